"""Where a component's author works: an environment with the core and replay, and a shell in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ..commands import run
from ..packaging.conftest import PIP, Environment

__all__ = ["Workshop"]

PIP_PROGRAM = """#!/bin/sh
command=$1; shift
if [ "$command" = install ]; then set -- --no-index --no-build-isolation "$@"; fi
exec "{python}" -m pip --disable-pip-version-check --python "{environment}" "$command" "$@"
"""
"""This process's pip, working offline on another environment: build tools are those it sees."""

CONTRACT = "--contract-profile=dev --hypothesis-seed=0"
"""Contract tests here show that packages work, in seconds; others look harder for broken rules."""

PYTEST_PROGRAM = """#!/bin/sh
exec "{environment}/bin/python" -m pytest -p no:cacheprovider "$@"
"""


class Workshop(Environment):
    """An environment whose `kvgraft`, `pip`, `pytest` and `python` a shell finds first.

    Args:
        directory: where to make it.
        wheels: the packages of ours in it.
    """

    def __init__(self, directory: Path, wheels: dict[str, Path]) -> None:
        super().__init__(directory, wheels)
        self.install(*wheels)
        for name, program in (("pip", PIP_PROGRAM), ("pytest", PYTEST_PROGRAM)):
            path = directory / "bin" / name
            path.write_text(program.format(python=sys.executable, environment=directory))
            path.chmod(0o755)

    def shell(
        self, command: str, cwd: Path, contract: str = CONTRACT
    ) -> subprocess.CompletedProcess[str]:
        """Run one command line as its reader would type it; `contract` goes to pytest."""
        path = f"{self.directory / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return run("bash", "-c", command, cwd=cwd, PATH=path, PYTEST_ADDOPTS=contract)

    def succeeds(self, command: str, cwd: Path, contract: str = CONTRACT) -> str:
        """Run a command that must succeed; return its output."""
        done = self.shell(command, cwd, contract)
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def install_wheel_of(self, project: Path) -> Path:
        """Build a project's wheel and install it as it is; the wheel."""
        place = project.parent / "wheels"
        done = run(
            *(*PIP, "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", place, project)
        )
        assert done.returncode == 0, done.stderr
        (wheel,) = place.glob(f"{project.name.replace('-', '_')}-*.whl")
        self.wheels[project.name] = wheel
        self.install(project.name)
        return wheel

    def listed(self) -> dict[str, dict[str, Any]]:
        """The output of `kvgraft components --build`, by name."""
        rows = json.loads(self.succeeds("kvgraft components --build --json", self.directory))
        return {row["name"]: row for row in rows}

    def replayed(self, component: str, cwd: Path) -> dict[str, Any]:
        """The result of a replay in a device pool so small that the host tier is needed."""
        self.succeeds(
            f"kvgraft replay --synthetic chat --requests 40 --component {component} "
            "--device-tokens 6000 --host-tokens 200000 --load-policy always --json result.json",
            cwd,
        )
        result: dict[str, Any] = json.loads((cwd / "result.json").read_text())
        return result
