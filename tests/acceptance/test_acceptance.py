"""Without an accelerator the acceptance says so."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..commands import ROOT


@pytest.mark.no_gpu
def test_without_an_accelerator_one_line_says_so_and_the_status_is_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.acceptance"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stdout.splitlines()
    assert line.startswith("gpu-acceptance: torch ")
    assert line.endswith(" finds no accelerator here; nothing was run")
