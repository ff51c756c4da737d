"""The suite's findings are reported to every caller, in any number of processes."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from kvgraft import ContractViolation
from kvgraft.packages.registry import load_plugin
from kvgraft_testing import ComponentContract, Status
from kvgraft_testing.checking import Checker
from kvgraft_testing.clause import Clause, Undecided
from kvgraft_testing.machine import Drive
from kvgraft_testing.subject import Subject

from ..commands import run, run_forked
from ..mutants.packages import paged


def checker_that_found(rule: str) -> Checker:
    checker = Checker(load_plugin("mine", paged().implementation("mine")), profile="dev")
    found = Drive(Counter(admitted=1), ContractViolation(rule, None, "seen"), ("open",))
    vars(checker.subject)["driven"] = found
    return checker


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "rule",
    ["M8", "A7", *(pytest.param(each, marks=pytest.mark.long) for each in ("I7", "A11"))],
)
def test_a_finding_is_reported_once_whether_or_not_its_rule_concerns_the_component(
    rule: str,
) -> None:
    bad = [result for result in checker_that_found(rule).run() if result.bad]
    assert [(result.clause, result.rule) for result in bad] == [(f"{rule}-driven", rule)]


def test_a_run_with_undecided_clauses_and_no_failure_fails() -> None:
    def undecided(subject: Subject) -> None:
        raise Undecided("nobody knows")

    lost = Clause("T1", "lost", "It is decided.", "1.0", lambda subject: None, undecided)
    plugin = load_plugin("mine", paged().implementation("mine"))
    checker = Checker(plugin, profile="dev", clauses=[lost])
    vars(checker.subject)["driven"] = Drive(Counter(admitted=1))
    bad = [result for result in checker.run() if result.bad]
    assert [(result.clause, result.status) for result in bad] == [("T1-lost", Status.FAILED)]


FOUND_IN_ONE_PROCESS = """
import os
from collections import Counter
from kvgraft import ContractViolation
from kvgraft.packages.registry import select
from kvgraft_testing import ComponentContract
from kvgraft_testing.machine import Drive
from kvgraft_testing.subject import Subject

FINDER = os.environ.get("PYTEST_XDIST_WORKER", "gw1") == "gw1"
FOUND = Drive(Counter(admitted=1), ContractViolation({rule!r}, "full", "seldom"), ("open",))
Subject.drive = lambda self, ignored: FOUND if FINDER else Drive(Counter(admitted=1))


class TestFull(ComponentContract):
    plugin = select(["full"])[0]
"""


def pytest_in(directory: Path, *options: str) -> CompletedProcess[str]:
    """A test run of its own, in several processes with `-n`."""
    outside: dict[str, Any] = {name: None for name in os.environ if "XDIST" in name}
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(directory)]
    if "-n" in options:
        return run(sys.executable, *command, cwd=directory, **outside)
    return run_forked(*command, cwd=directory, **outside)


def outcome(directory: Path, rule: str, *options: str) -> CompletedProcess[str]:
    (directory / "test_contract.py").write_text(FOUND_IN_ONE_PROCESS.format(rule=rule))
    return pytest_in(directory, *options)


@pytest.mark.long
@pytest.mark.parametrize("rule", ["A7", "M8"])
def test_a_finding_of_only_one_of_two_processes_is_reported(tmp_path: Path, rule: str) -> None:
    done = outcome(tmp_path, rule, "-n", "2")
    assert done.returncode == 1, done.stdout
    assert f"{rule}: " in done.stdout
    assert "1 failed" in done.stdout or "2 failed" in done.stdout


@pytest.mark.long
def test_a_finding_is_reported_by_its_own_clause(tmp_path: Path) -> None:
    whole = outcome(tmp_path, "A7")
    assert whole.returncode == 1
    assert "test_clause[A7-driven]" in whole.stdout
    assert "1 failed" in whole.stdout


def test_a_finding_is_reported_by_another_clause_where_its_own_is_left_out(tmp_path: Path) -> None:
    part = outcome(tmp_path, "A7", "-k", "M1 or M2")
    assert part.returncode == 1
    assert "1 failed" in part.stdout


class Silent:
    def test_clause(self) -> None:
        """Asks nothing."""


class Unsealing:
    def __init_subclass__(cls) -> None:
        """Does not go on to the contract's."""


def test_a_class_beside_the_contract_brings_no_tests_of_its_own() -> None:
    with pytest.raises(TypeError, match="TestMine takes from Silent test_clause; a contract class"):
        type("TestMine", (Silent, ComponentContract), {"component": "full"})


def test_a_class_between_cannot_lift_the_seal() -> None:
    with pytest.raises(TypeError, match="Between defines __init_subclass__; a contract class"):
        type("Between", (ComponentContract,), {"__init_subclass__": lambda **kwargs: None})


@pytest.mark.parametrize("mark", [pytest.mark.skip, pytest.mark.xfail])
def test_a_contract_class_is_neither_skipped_nor_expected_to_fail(
    mark: pytest.MarkDecorator,
) -> None:
    with pytest.raises(TypeError, match="TestMine defines pytestmark; a contract class holds data"):
        type("TestMine", (ComponentContract,), {"component": "full", "pytestmark": [mark]})


UNSEALED = """
from kvgraft_testing import ComponentContract

class Unsealing:
    def __init_subclass__(cls): pass

class TestMixed(Unsealing, ComponentContract):
    component = "full"
    def test_clause(self): pass
    def test_expected_failures(self): pass
    def pytest_generate_tests(self, metafunc): pass
"""
SET_LATER = """
from kvgraft_testing import ComponentContract

class TestLater(ComponentContract):
    component = "full"

TestLater.test_clause = lambda self: None
"""


def test_the_seal_is_looked_at_again_when_tests_are_collected(tmp_path: Path) -> None:
    (tmp_path / "test_unsealed.py").write_text(UNSEALED)
    (tmp_path / "test_set_later.py").write_text(SET_LATER)
    done = pytest_in(tmp_path)
    assert done.returncode != 0
    for name in ("test_unsealed.py", "test_set_later.py"):
        _, _, told = done.stdout.partition(f"ERROR collecting {name}")
        assert "a contract class holds data only" in told.partition("ERROR collecting")[0], name
    assert "passed" not in done.stdout
