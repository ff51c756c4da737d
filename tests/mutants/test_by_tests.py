"""Bad cores that the state machine lets live are found by the tests."""

from __future__ import annotations

import re

import pytest

from ..commands import ROOT
from .by_tests import HEADING, TABLE, TESTS, judge, main
from .cores_held_out import CORES_HELD_OUT
from .survivors import SURVIVORS

AT_LEAST = 0.95
"""Share of the cores written apart from the suite that check and the tests find together."""

LISTED = [name for name in CORES_HELD_OUT if name in SURVIVORS]


def rows() -> dict[str, tuple[str, str]]:
    """By defect, the rule it breaks and the test that fails on it, as the document has them."""
    _, _, text = TABLE.read_text(encoding="utf-8").partition(HEADING)
    found = re.findall(r"^\| (.+) \| ([A-Z]\d+) \| (\S+) \|$", text, re.MULTILINE)
    return {name: (rule, test) for name, rule, test in found}


@pytest.mark.long
def test_a_test_that_fails_on_a_bad_core_passes_without_the_defect() -> None:
    tests = ["tests/tree/test_sharing.py"]
    found = judge("a receipt is not marked as released", tests)
    assert found.test == f"{tests[0]}::test_a_receipt_is_released_once_and_on_its_own_tree"
    assert not judge(None, tests).test


@pytest.mark.long
def test_tests_that_do_not_run_find_nothing() -> None:
    with pytest.raises(RuntimeError, match="pytest ended with 4"):
        judge(None, ["tests/of_nothing"])


def test_a_name_of_no_bad_core_is_refused() -> None:
    with pytest.raises(SystemExit, match="no bad core is named 'pins slide'"):
        main(["pins do not slide", "pins slide"])


def test_the_tests_that_are_asked_are_there() -> None:
    assert [each for each in TESTS if not (ROOT / each).exists()] == []


def test_the_table_has_every_survivor_with_a_test_that_is_there() -> None:
    found = rows()
    assert list(found) == LISTED, "run `python -m tests.mutants.by_tests`"
    assert [rule for rule, _ in found.values()] == [CORES_HELD_OUT[n].rules[0] for n in LISTED]
    for _, test in found.values():
        if test != "none":
            path, _, function = test.partition("::")
            assert f"def {function}(" in (ROOT / path).read_text(encoding="utf-8"), test


def test_check_and_the_tests_find_nearly_all_bad_cores() -> None:
    survived = [name for name, (_, test) in rows().items() if test == "none"]
    assert len(survived) <= (1 - AT_LEAST) * len(CORES_HELD_OUT), survived


@pytest.mark.long
@pytest.mark.parametrize("name", LISTED)
def test_the_test_named_in_the_table_fails_on_the_bad_core(name: str) -> None:
    _, test = rows()[name]
    assert test == "none" or judge(name, [test]).test.startswith(test)
