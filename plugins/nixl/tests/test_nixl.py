"""Runs the checks of `inside/`, with NIXL, in processes of their own.

UCX starts threads and takes over signals; neither is for the process that runs all tests.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvgraft import ConfigError
from kvgraft_nixl.engine import BUILDS, NixlTransport

from .inside.peer import LOOPBACK

INSIDE = Path(__file__).parent / "inside"
ROOT = Path(__file__).parents[3]
PARTS = ("check_processes.py", "check_rounds.py")
INSTALLED = any(importlib.util.find_spec(name) for name in BUILDS)

needs_nixl = pytest.mark.skipif(not INSTALLED, reason="needs NIXL: make test-nixl installs it")


def checked(part: str, *options: str, timeout_s: float = 280.0) -> str:
    """The output of a part that does not pass; empty if it does."""
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "python_files=check_*.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(INSIDE / part), *options],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        cwd=ROOT,
        env={**os.environ, **LOOPBACK, "NO_COLOR": "1"},
    )
    told = f"{part}: {done.stdout[-12_000:]}\n{done.stderr[-3_000:]}"
    return "" if done.returncode == 0 and " passed" in done.stdout else told


@needs_nixl
@pytest.mark.rule("D5")
@pytest.mark.parametrize("part", PARTS)
def test_requests_go_between_processes_over_nixl(part: str) -> None:
    told = checked(part)
    assert not told, told


def test_no_part_is_left_out() -> None:
    assert {*PARTS} == {path.name for path in INSIDE.glob("check_*.py")}


@pytest.mark.skipif(INSTALLED, reason="is about a machine without NIXL")
def test_without_nixl_the_error_says_how_to_install_it() -> None:
    with pytest.raises(ConfigError, match="pip install --no-deps nixl-cu12"):
        NixlTransport()
