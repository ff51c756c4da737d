"""Any order of calls leaves the cache agreeing with the brute-force model.

A failure prints the calls that led to it, made as short as Hypothesis can; to run them again, make
a machine and call its rules: `state = machine_for(SETUPS["full+swa"])(); state.open(...)`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis.stateful import run_state_machine_as_test

from .machine import machine_for
from .setups import SETUPS


@pytest.mark.parametrize("name", SETUPS)
def test_the_cache_agrees_with_the_model_after_every_call(
    name: str, fuzz_steps: int, record_property: Callable[[str, object], None]
) -> None:
    machine = machine_for(SETUPS[name])
    try:
        run_state_machine_as_test(machine)
        while machine.total["steps"] * len(SETUPS) < fuzz_steps:
            run_state_machine_as_test(machine)
    finally:
        record_property("machine", dict(machine.total))
    assert machine.total["examples"]
