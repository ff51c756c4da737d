"""A fork is a process of its own that ends as a started one does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..commands import KVGRAFT, run, run_forked

CODE = """
import json, os, sys
print(json.dumps([sys.argv, os.getcwd(), os.environ["GIVEN"], "COLUMNS" in os.environ, __name__]))
print("problem", file=sys.stderr)
sys.exit(3)
"""


def test_a_fork_has_the_given_arguments_directory_and_environment(tmp_path: Path) -> None:
    done = run_forked("-c", CODE, "one", cwd=tmp_path, GIVEN="two", COLUMNS=None)
    assert json.loads(done.stdout) == [["-c", "one"], str(tmp_path), "two", False, "__main__"]
    assert (done.returncode, done.stderr) == (3, "problem\n")


def test_a_fork_has_torch_and_leaves_nothing_to_the_next_one() -> None:
    told = "import sys; print('torch' in sys.modules, hasattr(sys, 'left')); sys.left = True"
    assert [run_forked("-c", told).stdout for _ in range(2)] == ["True False\n"] * 2


@pytest.mark.parametrize(
    ("code", "status"), [("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_a_fork_that_fails_says_so(code: str, status: int) -> None:
    done = run_forked("-c", code)
    assert done.returncode == status
    assert ("ZeroDivisionError" in done.stderr) == (status == 1)


def test_a_fork_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_forked("-c", "import time; time.sleep(600)", timeout_s=0.01)


def test_a_command_says_the_same_in_a_fork_and_when_started() -> None:
    forked, started = run_forked(KVGRAFT, "storage", "--help"), run(KVGRAFT, "storage", "--help")
    assert forked.stdout == started.stdout != ""
    assert run_forked("-c", "import sys; print(sys.executable)").stdout == f"{sys.executable}\n"
