"""Packages that are not installed, under the clauses that are asked of hooks and pools."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ..commands import run_forked

__all__ = ["expect_kept"]

ASK_EACH = """
import importlib, json, sys
from kvgraft.packages.registry import load_plugin
from kvgraft_testing import CLAUSES
from kvgraft_testing.checking import Checker

def answers(name):
    implementation = importlib.import_module("kvgraft_" + name.replace("-", "_")).plugin
    checker = Checker(load_plugin(name, implementation), profile="dev")
    idents = [each for each in CLAUSES if not each.endswith("-driven")]
    return [checker.decide(each).as_json() for each in idents]

sys.path[:0] = sys.argv[2:]
print(json.dumps({name: answers(name) for name in sys.argv[1].split(",")}))
"""


def expect_kept(names: Iterable[str], sources: Iterable[Path]) -> None:
    """See components pass every clause but those of the state machine."""
    done = run_forked("-c", ASK_EACH, ",".join(names), *sources)
    assert done.returncode == 0, done.stderr
    for name, answers in json.loads(done.stdout).items():
        statuses = Counter(each["status"] for each in answers)
        assert statuses.keys() == {"passed", "not applicable"}, (name, done.stdout)
        assert statuses["passed"] > 20, (name, done.stdout)
