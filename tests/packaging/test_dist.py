"""One command installs the folder that `make dist` fills, and what it installs is compiled."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from ..commands import ROOT, run
from .conftest import PIP
from .test_build import ALONE

REPLAY = (
    *("replay", "--synthetic", "chat", "--requests", "100", "--component", "full"),
    *("--device-tokens", "60k", "--host-tokens", "400k"),
)

IS_COMPILED = "from kvgraft.compiled import is_compiled; print(is_compiled())"

NEEDED = ("torch>=2.6", "numpy>=1.26")
"""Of the environments' own; the rest pip takes from an index as well."""


def other_pythons() -> list[str]:
    """Other supported Pythons of this machine, by the names under which they are found."""
    names = [f"python3.{minor}" for minor in range(10, 14) if minor != sys.version_info.minor]
    found = [name for name in names if shutil.which(name)]
    return [name for name in found if not run(name, "-m", "venv", "--help").returncode]


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_the_folder_installs_with_one_command_in_every_python_of_this_machine(
    tmp_path: Path,
) -> None:
    """In new environments; the compiled wheels are taken where a compiler made them."""
    if shutil.which("cc") is None:
        pytest.skip("without a C compiler there are no compiled wheels")
    pythons, dist = other_pythons(), tmp_path / "dist"
    settings = {"STAMP": "", "PY": sys.executable, "DIST": dist, "PYTHONS": " ".join(pythons)}
    settings |= {"COMPILED": tmp_path / "compiled", "WHEELS": tmp_path / "wheels"}
    given = [f"{name}={value}" for name, value in settings.items()]
    done = run("make", "--no-print-directory", "dist", *given, cwd=ROOT, timeout_s=2000, **ALONE)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in (sys.executable, *pythons):
        place = tmp_path / Path(name).name
        assert not run(name, "-m", "venv", place).returncode
        python = place / "bin" / "python"
        for needed in (NEEDED, ("--find-links", str(dist), "kvgraft[all]")):
            done = run(*PIP, "--python", python, "install", "-q", *needed, timeout_s=600)
            assert done.returncode == 0, done.stderr
        done = run(python, "-c", IS_COMPILED, cwd=place, timeout_s=600)  # torch is new to the disk
        assert done.stdout == "True\n"
        done = run(python.with_name("kvgraft"), *REPLAY, cwd=place, timeout_s=600)
        assert done.returncode == 0, done.stderr
        assert "token hit rate" in done.stdout
