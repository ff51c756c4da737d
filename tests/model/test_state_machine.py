"""Any order of calls leaves the cache agreeing with the brute-force model."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from .machine import machine_for
from .setups import SETUPS


@pytest.mark.parametrize("name", SETUPS)
def test_the_cache_agrees_with_the_model_after_every_call(name: str) -> None:
    run_state_machine_as_test(machine_for(SETUPS[name]))
