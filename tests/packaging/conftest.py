"""Wheels of this checkout and environments to install them in."""

from __future__ import annotations

import site
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from ..commands import ROOT, run

DISTRIBUTIONS = (
    "core",
    *sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("plugins/*/pyproject.toml")),
)
"""All, whatever Python version their clients need: none is imported here."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels, by distribution."""
    directory = tmp_path_factory.mktemp("wheels")
    sources = [str(ROOT / each) for each in DISTRIBUTIONS]
    flags = ("-q", "--no-deps", "--no-build-isolation", "--ignore-requires-python")
    done = run(*PIP, "wheel", *flags, "-w", directory, *sources)
    assert done.returncode == 0, done.stderr
    return {path.name.split("-")[0].replace("_", "-"): path for path in directory.glob("*.whl")}


class Environment:
    """A virtual environment with the third-party packages of this one and nothing of ours.

    Args:
        directory: where to make it.
        wheels: what can be installed.
    """

    def __init__(self, directory: Path, wheels: dict[str, Path]) -> None:
        self.directory = directory
        self.wheels = wheels
        venv.create(directory, symlinks=True)
        others = directory / "others"
        others.mkdir()
        for installed in map(Path, site.getsitepackages()):
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

    def uninstall(self, *distributions: str) -> None:
        self._pip("uninstall", "-q", "-y", *distributions)

    def kvgraft(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the installed command, away from the source tree."""
        return run(self.directory / "bin" / "kvgraft", *arguments, cwd=self.directory)

    def run_python(self, code: str) -> subprocess.CompletedProcess[str]:
        """Run a line of Python in it."""
        return run(self.python, "-c", code, cwd=self.directory)


@pytest.fixture
def environment(tmp_path: Path, wheels: dict[str, Path]) -> Callable[..., Environment]:
    """Make an environment with some of the distributions in it."""

    def _environment(*distributions: str) -> Environment:
        made = Environment(tmp_path / "environment", wheels)
        made.install(*distributions)
        return made

    return _environment
