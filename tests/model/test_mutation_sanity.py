"""Defects that random calls meet too seldom, driven by hand; the others are in `tests/mutants`."""

from __future__ import annotations

import pytest

from kvgraft.errors import ContractViolation
from kvgraft.testing.machine import Sizes, references, setup_for
from kvgraft.testing.machine.harness import Harness
from kvgraft.types import Tier

from ..mutants.cores import recency_is_not_lifted


def use_a_prefix_through_its_continuation() -> None:
    """Evict where a page was last used only as the prefix of a longer match.

    Random calls get there too seldom: older pages must have been pinned in between.
    """
    harness = Harness(setup_for(references()[:1]), Sizes(page_size=1, device=12))

    def serve(*tokens: int) -> None:
        live = harness.begin(None, tokens, 0, None)
        assert harness.admit(live).admitted
        harness.load_back(live)
        harness.prefill(live, None)
        harness.finish(live)
        harness.rooms.drain()

    serve(1, 1)
    serve(1, 1, 2, 2)
    serve(2, 2, 2)
    pinned = harness.begin(None, (2, 2, 2, 1), 0, None)
    harness.abort(harness.begin(None, (1, 1, 2, 2, 1), 0, None))
    (everything,) = harness.model.components
    harness.rooms.evict(everything, 1, Tier.DEVICE)
    harness.abort(pinned)
    harness.rooms.evict(everything, 1, Tier.DEVICE)
    harness.close()


def test_a_use_of_a_node_is_a_use_of_its_prefix() -> None:
    use_a_prefix_through_its_continuation()


def test_recency_that_is_not_lifted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recency_is_not_lifted(monkeypatch)
    with pytest.raises(ContractViolation, match="used less recently stayed"):
        use_a_prefix_through_its_continuation()
