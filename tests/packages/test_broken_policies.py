"""A package whose eviction policy cannot be used is named in one line; the process goes on (P5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from .distributions import Shelf

LOAD = """
from kvgraft.errors import ConfigError
from kvgraft.packages.registry import load_policy
try:
    load_policy("thrown")
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ImportError('no such file')", ": import failed: ImportError: no such file"),
        ("import sys; sys.exit(7)", ": import failed: SystemExit: 7"),
        ("MADE = 3", ": its entry point is an int; publish a class, or a function without"),
        ("def MADE():\n    return 1 / 0", " cannot be made: ZeroDivisionError: division by zero"),
        ("def MADE():\n    raise SystemExit(7)", " cannot be made: SystemExit: 7"),
        ("MADE = object", ": an object has no name, classifies, order"),
    ],
)
def test_a_broken_policy_is_refused_in_one_line(tmp_path: Path, source: str, reason: str) -> None:
    shelf = Shelf(tmp_path)
    shelf.put("kvgraft-thrown", source, group="kvgraft.policies", member="MADE")
    done = shelf.run("-c", LOAD)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"eviction policy 'thrown'{reason}")
    assert done.stdout.count("\n") == 1
