"""Defects written without a look at the other lists: some here, all in the long tests.

Each of those named here was not found before the state machine's transfers could wait, time out and
meet others, and before it compared requests whole.
"""

from __future__ import annotations

import pytest

from .components import ComponentMutant
from .components_held_out import COMPONENTS_HELD_OUT
from .cores_held_out import CORES_HELD_OUT
from .killing import find_in_core, first_failure, wrongly_killed
from .survivors import SURVIVORS

QUICK = (
    "a deferral drops the boundaries to capture",
    "a deferral gives up the reservation",
    "a split forgets hits",
    "falsy namespaces are none",
    "a backup does not wait for its source's computation",
    "a request starts before its load-back has arrived",
    "private rows are given without a look",
)
"""Core mutants that are found within a second or two."""

DRIVEN = (
    "a load-back moves the bytes itself and returns nothing to copy",
    "a backup moves the bytes itself and returns nothing to copy",
    "a backup reads its source when it is built",
)
"""Components that nothing but the state machine's transfers told from correct ones."""


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", QUICK)
def test_a_core_that_was_not_told_from_the_correct_one_is_found(name: str) -> None:
    problem = wrongly_killed(find_in_core(CORES_HELD_OUT[name]), CORES_HELD_OUT[name].rules)
    assert problem is None, problem


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CORES_HELD_OUT) - set(QUICK)))
def test_another_core_with_one_line_changed_is_found_unless_it_is_known_to_survive(
    name: str,
) -> None:
    problem = wrongly_killed(find_in_core(CORES_HELD_OUT[name]), CORES_HELD_OUT[name].rules)
    if name in SURVIVORS:
        assert problem is not None, f"{name!r} is killed now: take it out of SURVIVORS"
    else:
        assert problem is None, problem


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "mutant",
    [mutant for mutant in COMPONENTS_HELD_OUT if mutant.name in DRIVEN],
    ids=lambda mutant: mutant.name,
)
def test_a_component_that_moves_bytes_too_early_is_found(mutant: ComponentMutant) -> None:
    problem = wrongly_killed(first_failure(mutant.package), mutant.rules)
    assert problem is None, problem


@pytest.mark.long
@pytest.mark.parametrize(
    "mutant",
    [mutant for mutant in COMPONENTS_HELD_OUT if mutant.name not in DRIVEN],
    ids=lambda mutant: mutant.name,
)
def test_another_component_with_a_defect_is_found(mutant: ComponentMutant) -> None:
    problem = wrongly_killed(first_failure(mutant.package), mutant.rules)
    assert problem is None, problem


@pytest.mark.parametrize("name", CORES_HELD_OUT)
def test_the_line_that_a_bad_core_changes_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CORES_HELD_OUT[name].put_in(monkeypatch)


def test_every_survivor_is_a_mutant_with_a_reason() -> None:
    assert set(SURVIVORS) <= set(CORES_HELD_OUT) - set(QUICK)
    assert all(SURVIVORS.values())


def test_there_are_enough_held_out_mutants() -> None:
    assert len(COMPONENTS_HELD_OUT) >= 34
    assert len(CORES_HELD_OUT) >= 30
