"""Wheels of this checkout and environments to install them in."""

from __future__ import annotations

import re
import site
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import importlib_metadata
import pytest

from ..commands import ROOT, run
from ..once import made_once

DISTRIBUTIONS = (
    "core",
    *sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/pyproject.toml")),
)
"""All, even if their clients need another Python version: none is imported here."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


BUILD = """
import os, sys
from hatchling.build import build_wheel
for source in sys.argv[2:]:
    os.chdir(source)
    build_wheel(sys.argv[1])
"""
"""The hook that pip calls for each wheel, for all of them in one process."""


def built_wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels, by distribution; built once in a run of tests."""

    def build(directory: Path) -> None:
        sources = [ROOT / each for each in DISTRIBUTIONS]
        done = run(sys.executable, "-c", BUILD, directory, *sources)
        assert done.returncode == 0, done.stderr

    directory = made_once(tmp_path_factory, "wheels", build)
    return {path.name.split("-")[0].replace("_", "-"): path for path in directory.glob("*.whl")}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels, by distribution."""
    return built_wheels(tmp_path_factory)


def with_needs(*distributions: str) -> list[str]:
    """Distributions of ours, and those of ours that they depend on."""
    found = {"kvgraft"}
    left = [*distributions]
    while left:
        name = left.pop()
        if name in found:
            continue
        found.add(name)
        for needed in importlib_metadata.requires(name) or ():
            if needed.startswith("kvgraft-") and "extra" not in needed:
                left += re.findall(r"^[a-z-]+", needed)
    return sorted(found)


class Environment:
    """A virtual environment with the third-party packages of this one and nothing of ours.

    Args:
        directory: where to make it.
        wheels: the wheels that can be installed.

    Attributes:
        installed: our distributions in it.
    """

    def __init__(self, directory: Path, wheels: dict[str, Path]) -> None:
        self.directory = directory
        self.wheels = wheels
        self.installed: set[str] = set()
        venv.create(directory, symlinks=True)
        others = directory / "others"
        others.mkdir()
        for installed in filter(Path.is_dir, map(Path, site.getsitepackages())):
            for entry in installed.iterdir():
                if "kvgraft" not in entry.name and entry.suffix != ".pth":
                    (others / entry.name).symlink_to(entry)
        (packages,) = directory.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text(f"{others}\n")

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    def _pip(self, *arguments: str | Path) -> None:
        done = run(*PIP, "--python", self.python, *arguments)
        assert done.returncode == 0, done.stderr

    def install(self, *distributions: str) -> None:
        """Install wheels as they are, without looking for anything else."""
        self._pip(
            *("install", "-q", "--no-deps", "--no-index", "--ignore-requires-python"),
            *(self.wheels[name] for name in distributions),
        )
        self.installed.update(distributions)

    def uninstall(self, *distributions: str) -> None:
        self._pip("uninstall", "-q", "-y", *distributions)
        self.installed.difference_update(distributions)

    def change_to(self, *distributions: str) -> None:
        """Install those that are missing, and remove the others."""
        wanted = set(distributions)
        if self.installed - wanted:
            self.uninstall(*sorted(self.installed - wanted))
        if wanted - self.installed:
            self.install(*sorted(wanted - self.installed))

    def kvgraft(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the installed command, away from the source tree."""
        return run(self.directory / "bin" / "kvgraft", *arguments, cwd=self.directory)

    def run_python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run a line of Python in it."""
        return run(self.python, "-c", code, cwd=self.directory)


@pytest.fixture(scope="session")
def shared_environment(
    tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]
) -> Environment:
    """One environment for all tests, which install into it and uninstall from it."""
    return Environment(tmp_path_factory.mktemp("packaging") / "environment", wheels)


@pytest.fixture
def environment(shared_environment: Environment) -> Callable[..., Environment]:
    """Give the environment with some of the distributions in it, and no others."""

    def _environment(*distributions: str) -> Environment:
        shared_environment.change_to(*distributions)
        return shared_environment

    return _environment
