"""F3: one pool was short and another's data was evicted; availability is per pool (R3, E2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgraft import Reach, TokenKey, Trailing
from kvgraft.requests.eviction import Evictor
from kvgraft.tree import eviction
from kvgraft.tree.component import TreeComponent
from kvgraft.types import Tier

from ..serving.components import PagedPackage
from ..serving.own_parts import override, own_parts
from ..serving.server import Server
from ..serving.setups import SINKS, SSM, Setup, installed, mixed

UNRELATED = list(range(500, 524))
STATES = {"states": 12, "host_states": 64}


def window(tokens: int) -> Setup:
    return mixed(("full",), PagedPackage("narrow", Reach(Trailing(tokens))))


def swa(tokens: int) -> Setup:
    setup = installed("full", "swa")
    return Setup(f"swa {tokens}", {**setup.options, "swa": {"window": tokens}}, setup.plugins)


CASES = [
    *[(swa(tokens), tokens + 2) for tokens in (2, 3, 4, 8)],
    (window(5), 7),
    (mixed(("full",), SINKS), 10),
    (mixed(("full",), PagedPackage("quartered", Reach(Trailing(4)), 4)), 6),
    (mixed(("full",), SSM), 6),
    (installed("full", "mamba"), 6),
    (mixed(("hisparse",), SINKS), 10),
]
IDS = [setup.name for setup, _ in CASES]


EnsureFree = Callable[[Evictor, TreeComponent, Tier, int, int | None], bool]


def load_back_with_the_narrow_pool_short(
    setup: Setup, chain: int, ensure_free: EnsureFree = Evictor.ensure_free
) -> None:
    """The field's scenario: a chain on HOST, the narrow pool one page short of its window.

    Page size 1. The wide pool has room for the whole chain.
    """
    narrow = next(name for name in setup.options if name not in ("full", "hisparse"))
    states = narrow in ("mamba", "ssm")
    options: dict[str, Any] = {narrow: STATES if states else {"device_tokens": 64}}
    if "hisparse" in setup.options:
        options["hisparse"] = {"max_running": 64}
    cache = setup.open(page_size=1, device_tokens=256, host_tokens=256, parts=own_parts, **options)
    server = Server(cache)
    try:
        wide, short = cache.tree.components
        server.serve(range(chain))
        server.empty_device()
        for end in range(1, len(UNRELATED) + 1):
            server.serve(UNRELATED[:end])
        request = server.begin([*range(chain), 77])
        assert request.anchor_tokens == chain
        loaded, wanted = (part.host_slots for part in request.components)
        assert loaded == chain
        per_page = short.slots_per_page
        surplus = (short.device.free - wanted) // per_page + 1
        for size in [2] * surplus if states else [surplus]:
            holder = server.start(range(900, 900 + size))
            assert cache.allocate(holder, size)
        assert short.device.free == wanted - per_page
        assert wide.device.free >= loaded
        decision = cache.admit(request)
        assert decision.admitted, decision
        held = [_in_tree(wide), _in_tree(short)]
        override(cache.evictor, ensure_free=ensure_free)
        server.load_back(request)
        lost = held[0] + loaded - _in_tree(wide), held[1] + wanted - _in_tree(short)
        assert lost[0] == 0, "the wide pool lost data it had room for"
        assert lost[1] == per_page, "more than the shortfall"
        told = cache.explain(TokenKey([*UNRELATED, 1])).components[0]
        assert told.device_accepts == len(UNRELATED), "an unrelated prefix was lost"
        server.prefill(request)
        cache.check_integrity()
    finally:
        cache.close()


def _in_tree(component: TreeComponent) -> int:
    return component.device.evictable + component.device.pinned


@pytest.mark.parametrize(("setup", "chain"), CASES, ids=IDS)
@pytest.mark.rule("R3")
def test_a_load_back_makes_room_in_the_short_pool_alone_and_for_its_own_shortfall(
    setup: Setup, chain: int
) -> None:
    load_back_with_the_narrow_pool_short(setup, chain)


def take_the_minimum_over_the_pools(
    evictor: Evictor, component: TreeComponent, tier: Tier, n_slots: int, tenant: int | None
) -> bool:
    """The field bug: the pool with the least decides how much is available."""
    del tier, tenant
    free = min(each.device.free // each.slots_per_page for each in evictor.tree.components)
    shortfall = n_slots - free * component.slots_per_page
    if shortfall > 0:
        eviction.evict_device(evictor.tree, component, shortfall)
    return component.device.free >= n_slots


def evict_the_base_for_another_pool(
    evictor: Evictor, component: TreeComponent, tier: Tier, n_slots: int, tenant: int | None
) -> bool:
    """Its twin: whichever pool is short, the base gives."""
    del tier, tenant
    base = evictor.tree.components[0]
    while component.device.free < n_slots and eviction.evict_device(evictor.tree, base, 1):
        pass
    return component.device.free >= n_slots


@pytest.mark.parametrize(("setup", "chain"), CASES, ids=IDS)
@pytest.mark.parametrize("bug", [take_the_minimum_over_the_pools, evict_the_base_for_another_pool])
def test_with_the_bug_an_unrelated_prefix_is_evicted(
    setup: Setup, chain: int, bug: EnsureFree
) -> None:
    with pytest.raises(AssertionError, match="lost data it had room for"):
        load_back_with_the_narrow_pool_short(setup, chain, bug)
