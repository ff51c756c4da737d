"""Defects and legal calls that random calls meet too seldom, driven by hand.

Other defects are in `tests/mutants`.
"""

from __future__ import annotations

import pytest

from kvgraft import Everything, Reach, Trailing
from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft.tree import operations
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_testing.machine import Sizes, paged_plugin, references, setup_for
from kvgraft_testing.machine.engines import Wait
from kvgraft_testing.machine.harness import Harness

from ..mutants.cores import recency_is_not_lifted
from .setups import OPTIONS


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


@pytest.mark.plain_build
def test_recency_that_is_not_lifted_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    recency_is_not_lifted(monkeypatch)
    with pytest.raises(ContractViolation, match="data that was to leave before stayed"):
        use_a_prefix_through_its_continuation()


def test_a_backup_at_a_hit_takes_no_room_from_data_above_though_that_is_older() -> None:
    everything = paged_plugin("everything", Reach(Everything()))
    window = paged_plugin("window", Reach(Trailing(3)))
    setup = setup_for([everything, window], {"window": {"host_tokens": 6}})
    harness = Harness(setup, Sizes(page_size=1, device=24, host=20))

    def serve(*tokens: int, fails: bool = False) -> None:
        live = harness.begin(None, tokens, 0, None)
        assert harness.admit(live).admitted
        harness.load_back(live)
        harness.prefill_all(live)
        harness.finish(live)
        if fails:
            harness.rooms.step(0, fails=True)
        harness.rooms.drain()

    serve(1)
    serve(1, 2, 3, 4, fails=True)
    serve(5, 6, 7, 8)
    live = harness.begin(None, (1, 2, 3, 4, 9), 0, None)
    on_host = harness.bench.seen.held["window"].host
    assert (None, (1,)) in on_host
    assert (None, (5,)) not in on_host
    harness.abort(live)
    harness.close()


EVERYTHING, _, STATE = references()

HANGING = {
    "a canonical copy": (setup_for(["hisparse"], OPTIONS, [EVERYTHING]), ["hisparse"]),
    "a state demoted before": (
        setup_for([EVERYTHING, STATE]),
        [STATE.name] + [EVERYTHING.name] * 2,
    ),
}
"""Data on HOST whose base is being demoted: the components, and evictions that lead there."""

PAGE = (None, (1, 2, 3, 4))
"""The last page of its node."""


def outlast_a_demotion(name: str) -> Harness:
    """A node whose base is on no tier: its copy to HOST outlasted the eviction from DEVICE.

    The first component evicted has data there, on HOST.
    """
    setup, evicted = HANGING[name]
    harness = Harness(setup, Sizes(policy=WritePolicy.WRITE_BACK))
    for tokens in [(1, 2, 3, 4, 5), (1, 2, 3, 4, 5, 6, 7)][: len(evicted)]:
        live = harness.begin(None, tokens, 0, None)
        assert harness.admit(live).admitted
        harness.prefill_all(live)
        harness.finish(live)
    *first, last = map(harness.model.component, evicted)
    for component in first:
        harness.rooms.evict(component, 1, Tier.DEVICE)
    harness.rooms.expect_waits([Wait.TIMES_OUT] * 2)
    harness.rooms.evict(last, 1, Tier.DEVICE)
    held = harness.bench.seen.held
    assert PAGE in held[EVERYTHING.name].backing_up
    assert PAGE not in held[EVERYTHING.name].device
    assert PAGE in held[evicted[0]].host
    return harness


@pytest.mark.parametrize("outcome", [Wait.RUNS, Wait.FAILS])
@pytest.mark.parametrize("name", HANGING)
def test_data_on_host_goes_if_the_demotion_of_its_base_fails_in_a_later_call(
    name: str, outcome: Wait
) -> None:
    harness = outlast_a_demotion(name)
    harness.rooms.expect_waits([outcome])
    harness.rooms.drain()
    for held in harness.bench.seen.held.values():
        assert (PAGE in held.host) == (outcome is Wait.RUNS)
    harness.close()


@pytest.mark.plain_build
@pytest.mark.parametrize("name", HANGING)
def test_data_on_host_that_goes_though_its_base_was_demoted_is_found(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drop_all_but_the_base(tree: Tree, node: Node) -> None:
        for component in tree.components:
            if component.name != EVERYTHING.name and node.cells[component.index].host is not None:
                tree.drop(node, component, Tier.HOST, "cascade")

    harness = outlast_a_demotion(name)
    monkeypatch.setattr(operations, "drop_unreachable", drop_all_but_the_base)
    with pytest.raises(ContractViolation, match=r"left host at .* short were no pools"):
        harness.rooms.drain()
