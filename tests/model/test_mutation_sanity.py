"""The state machine notices defects: each is put into the core and must be found by its rule.

Examples are the same each time and failures are not made smaller, so what is tested is whether the
checks bite, which rule they name, and how soon.
"""

from __future__ import annotations

import pytest
from hypothesis import settings

from kvgraft.errors import ContractViolation
from kvgraft.testing.machine import Setup, Sizes, machine_for, references, search, setup_for
from kvgraft.testing.machine.driver import Driver
from kvgraft.types import Tier

from ..mutants.cores import CORES, recency_is_not_lifted

SEARCH = settings(derandomize=True, max_examples=250, stateful_step_count=50)


def reference_set(*kinds: str) -> Setup:
    return setup_for([each for each in references() if each.name.split("_")[1] in kinds])


def use_a_prefix_through_its_continuation() -> None:
    """Evict where a page was last used only as the prefix of a longer match.

    Random calls get there too seldom: whoever is older must have been pinned in between.
    """
    driver = Driver(reference_set("everything"), Sizes(page_size=1, device=12))

    def serve(*tokens: int) -> None:
        live = driver.begin(None, tokens, 0, None)
        assert driver.admit(live).admitted
        driver.load_back(live)
        driver.prefill(live, None)
        driver.finish(live)
        driver.rooms.drain()

    serve(1, 1)
    serve(1, 1, 2, 2)
    serve(2, 2, 2)
    pinned = driver.begin(None, (2, 2, 2, 1), 0, None)
    driver.abort(driver.begin(None, (1, 1, 2, 2, 1), 0, None))
    (everything,) = driver.model.components
    driver.rooms.evict(everything, 1, Tier.DEVICE)
    driver.abort(pinned)
    driver.rooms.evict(everything, 1, Tier.DEVICE)
    driver.close()


def test_a_use_of_a_node_is_a_use_of_its_prefix() -> None:
    use_a_prefix_through_its_continuation()


def test_recency_that_is_not_lifted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recency_is_not_lifted(monkeypatch)
    with pytest.raises(ContractViolation, match="used less recently stayed"):
        use_a_prefix_through_its_continuation()


@pytest.mark.long
@pytest.mark.parametrize("name", CORES)
def test_the_state_machine_finds_the_defect_and_names_its_rule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant = CORES[name]
    machine = machine_for(reference_set(*mutant.kinds))
    mutant.put_in(monkeypatch)
    found = search(machine, SEARCH)
    assert found is not None
    assert found.violation.rule in mutant.rules, str(found.violation)
