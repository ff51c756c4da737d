"""The state machine of the contract suite with its caches on the simulated device."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
import torch

from kvgraft_testing.machine import Setup, drive, references, setup_for
from kvgraft_testing.machine.memory import spoil

from .mutants import MUTANTS
from .player import COMPONENTS

SETTINGS = hypothesis.settings(max_examples=25, stateful_step_count=40, derandomize=True)
FEW = hypothesis.settings(SETTINGS, max_examples=16)

SOON = (
    "a gather does not wait for compute",
    pytest.param("a backup's ring is emptied before it is filled", marks=pytest.mark.long),
)
"""Defects that show in the first examples; `test_cache` looks for all of them."""


def on_device(name: str) -> Setup:
    """A component beside others of each kind."""
    return replace(setup_for([name], COMPONENTS, references()), device="simulated")


@pytest.mark.parametrize(
    "names",
    [["full"], pytest.param(["full", "swa", "mamba"], marks=pytest.mark.long)],
    ids="+".join,
)
def test_the_state_machine_finds_nothing_out_of_order(names: list[str]) -> None:
    found = drive(replace(setup_for(names, COMPONENTS), device="simulated"), settings=FEW)
    assert found.violation is None, found.steps
    assert found.counts["copies"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", COMPONENTS)
def test_the_state_machine_finds_nothing_out_of_order_in_company(name: str) -> None:
    found = drive(on_device(name))
    assert found.violation is None, found.steps


@pytest.mark.long
@pytest.mark.parametrize("name", SOON)
def test_the_state_machine_shrinks_a_defect_to_few_calls(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS[name].put_in(monkeypatch)
    found = drive(on_device("full"), settings=SETTINGS)
    assert found.violation is not None, "survived"
    assert found.violation.rule in MUTANTS[name].rules
    assert len(found.steps) < 10


def test_only_rows_that_there_are_get_spoilt() -> None:
    memory = torch.zeros((4, 2), dtype=torch.int16)
    spoil(memory, torch.tensor([-1, 2, 4]))
    assert memory.tolist() == [[0, 0], [0, 0], [-7, -7], [0, 0]]
