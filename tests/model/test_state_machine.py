"""Any order of calls leaves the cache agreeing with the brute-force model.

A failure prints the calls that led to it, made as few and small as they get. To run them again,
make a machine and call its rules: `state = machine_for(SETUPS["full+swa"])(); state.open(...)`.
`make fuzz` runs the same for a million steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import settings

from kvgraft_testing.machine import Drive, drive

from .setups import SETUPS


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SETUPS)
def test_the_cache_agrees_with_the_model_after_every_call(
    name: str, fuzz_steps: int, record_property: Callable[[str, object], None]
) -> None:
    found = Drive(Counter())
    try:
        while not found.counts["steps"] or found.counts["steps"] * len(SETUPS) < fuzz_steps:
            found = found.then(drive(SETUPS[name], settings=settings()))
            if found.violation is not None:
                pytest.fail("\n".join([str(found.violation), *found.steps, *map(str, found.rules)]))
    finally:
        record_property("machine", dict(found.counts))
    assert found.counts["admitted"]
