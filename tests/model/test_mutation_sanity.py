"""Defects that random calls meet too seldom, driven by hand; the others are in `tests/mutants`."""

from __future__ import annotations

import pytest

from kvgraft.errors import ContractViolation
from kvgraft.testing.machine import Sizes, references, setup_for
from kvgraft.testing.machine.driver import Driver
from kvgraft.types import Tier

from ..mutants.cores import recency_is_not_lifted


def use_a_prefix_through_its_continuation() -> None:
    """Evict where a page was last used only as the prefix of a longer match.

    Random calls get there too seldom: whoever is older must have been pinned in between.
    """
    driver = Driver(setup_for(references()[:1]), Sizes(page_size=1, device=12))

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
