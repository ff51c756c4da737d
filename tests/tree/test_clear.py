"""A cache is cleared while it serves: nothing old is hit, and held data stays until let go of."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import ConfigError, GuardMode, LeaseError, TokenKey
from kvgraft.cache import Cache
from kvgraft.requests.request import Request
from kvgraft.types import Tier
from kvgraft_observe.events import Cleared, Evicted, Residency
from kvgraft_storage.settings import StorePolicy
from kvgraft_testing.stepped import SteppedTransferEngine

from ..counting import lines_run
from ..serving import life
from ..serving.server import Server, ledgers
from ..serving.setups import SETUPS, Setup
from ..storage_tier.shelf import Shelf, open_cache, settings, stocked, tier_of

PROMPT = list(range(100, 133))
EVERYTHING = "full+swa+mamba"
BARE: dict[str, Any] = {"payload": False, "guard": "off"}


def opened(name: str = EVERYTHING, **options: Any) -> Cache:
    return SETUPS[name].open(guard=GuardMode.ON, device_tokens=128, host_tokens=256, **options)


def anchor_of(cache: Cache, tokens: list[int], namespace: object = None) -> int:
    """How many tokens a request for them would resume from."""
    anchor: int = cache.explain(TokenKey([*tokens, 1], namespace)).anchor
    return anchor


def run(cache: Cache, key: TokenKey) -> Request:
    """An admitted request that has computed its prompt."""
    request = cache.begin(key, reserve=8)
    assert cache.admit(request).admitted
    cache.load_back(request)
    life.prefill(cache, request)
    return request


def is_empty(cache: Cache) -> bool:
    return not cache.tree.n_nodes and not cache.tree.roots and not cache.tree.cleared


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_an_idle_cache_is_empty_after_it_is_cleared(setup: Setup) -> None:
    with setup.open(guard=GuardMode.ON) as cache:
        fresh = ledgers(cache)
        Server(cache).serve(PROMPT, decode=3)
        on_device = {each.name: each.device.evictable for each in cache.tree.components}
        told = cache.clear()
        assert (told.namespaces, told.device, told.requests) == (1, on_device, 0)
        assert not any((*told.held_device.values(), *told.held_host.values()))
        assert is_empty(cache)
        assert ledgers(cache) == fresh
        evicted = cache.stats().components
        assert {name: each.device.evicted["cleared"] for name, each in evicted.items()} == on_device
        Server(cache).serve(PROMPT)
        assert cache.clear().namespaces == 1


def test_data_that_was_cleared_before_and_let_go_of_since_waits_for_a_poll() -> None:
    """The guard is on: another clearing need not free it (T3)."""
    with opened() as cache:
        cache.finish(run(cache, TokenKey(PROMPT, "old")))
        held = cache.begin(TokenKey(PROMPT, "old"))
        assert cache.clear("old").namespaces == 1
        cache.finish(run(cache, TokenKey(PROMPT, "new")))
        cache.drain()
        cache.abort(held)
        assert cache.clear("new").namespaces == 1
        cache.drain()
        assert is_empty(cache)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_running_request_goes_on_with_its_data_and_shares_nothing(setup: Setup) -> None:
    with setup.open(guard=GuardMode.ON) as cache:
        server = Server(cache)
        server.serve(PROMPT)
        request = server.start([*PROMPT, 7, 8, 9], reserve=6)
        resumed = request.anchor_tokens
        told = cache.clear()
        assert told.requests == 1
        assert any(told.held_device.values()) or not resumed
        assert anchor_of(cache, PROMPT) == 0
        server.prefill(request)  # reads the bytes it relies on
        server.decode(request, 4)
        assert not cache.checkpoint(request)
        assert cache.finish(request) == 0
        cache.drain()
        assert is_empty(cache)
        cache.check_integrity()


def test_clearing_again_frees_data_that_was_let_go_of_since() -> None:
    with opened() as cache:
        cache.finish(run(cache, TokenKey(PROMPT)))
        request = run(cache, TokenKey([*PROMPT, 1]))
        cache.drain()
        assert cache.clear().held_device["full"]
        cache.abort(request)
        assert not is_empty(cache)
        told = cache.clear()
        assert (told.namespaces, told.complete) == (0, True)
        assert told.device["full"]
        assert is_empty(cache)


def test_a_namespace_is_cleared_alone_and_none_is_one_of_them() -> None:
    with opened() as cache:
        for namespace in (None, "tenant"):
            cache.finish(run(cache, TokenKey(PROMPT, namespace)))
        cache.drain()
        assert cache.clear("nobody").namespaces == 0
        assert cache.clear(None).namespaces == 1
        assert anchor_of(cache, PROMPT) == 0
        assert anchor_of(cache, PROMPT, "tenant") == 32
        assert cache.clear().namespaces == 1
        assert is_empty(cache)


def test_a_request_that_waits_is_matched_again_when_it_is_admitted() -> None:
    with opened() as cache:
        server = Server(cache)
        server.serve(PROMPT)
        request = server.begin([*PROMPT, 1])
        assert request.anchor_tokens
        cache.clear()
        assert cache.admit(request).admitted
        assert request.anchor_tokens == 0
        cache.load_back(request)
        server.prefill(request)
        assert cache.finish(request) == 34
        cache.drain()
        assert anchor_of(cache, PROMPT) == 32
        cache.check_integrity()


def test_a_request_is_computed_anew_once_it_was_retracted_or_restarted() -> None:
    with opened() as cache:
        requests = [run(cache, TokenKey([*PROMPT, last])) for last in (1, 2)]
        cache.clear()
        assert cache.retract(requests[0]) == 0
        cache.restart(requests[1])
        assert requests[1].anchor_tokens == 0
        cache.drain()
        assert len(cache.tree.roots) == 1
        assert not cache.tree.cleared
        cache.abort(requests[1])
        assert is_empty(cache)


def test_a_large_tree_is_freed_in_parts_and_found_no_more_at_once() -> None:
    with opened() as cache:
        fresh = ledgers(cache)
        cache.evictor.sweeper.n_steps = 6
        stream, residency = cache.events(), Residency()
        for last in range(4):
            cache.finish(run(cache, TokenKey([*PROMPT[:8], *[last] * 8])))
        cache.drain()
        told = cache.clear()
        assert not told.complete
        assert 0 < told.device["full"] < 20
        assert anchor_of(cache, PROMPT[:8]) == 0
        residency.apply(stream.take())
        assert not any(residency.pages.values())
        cache.check_integrity()
        n_polls = 0
        while not is_empty(cache):
            cache.poll()
            n_polls += 1
        assert n_polls > 1
        assert ledgers(cache) == fresh
        assert not stream.take()
        assert cache.clear().complete


def lines_of_a_poll(n_conversations: int) -> int:
    """Lines that the dearest poll runs after a tree of so many conversations was cleared."""
    with Cache.open(["full"], page_size=1, device_tokens=4 * n_conversations, **BARE) as cache:
        for first in range(n_conversations):
            cache.finish(run(cache, TokenKey([first, 1, 2])))
        cache.clear()
        polls = [lines_run(cache.poll) for _ in range(12)]
        cache.drain()
        assert is_empty(cache)
        return max(polls)


@pytest.mark.plain_build
def test_no_poll_frees_much_of_a_large_tree() -> None:
    """Nor does it list all children of a root that has many: here of 300 in their parts."""
    few, many = lines_of_a_poll(100), lines_of_a_poll(300)
    assert many < 1.1 * few
    assert many < 8000


def test_room_for_a_long_prompt_is_made_from_cleared_data_alone() -> None:
    with Cache.open(["full"], page_size=1, device_tokens=1200, **BARE) as cache:
        cache.finish(run(cache, TokenKey(range(100), "stays")))
        for first in range(1000):
            cache.finish(run(cache, TokenKey([first], "goes")))
        cache.clear("goes")
        assert cache.evict("full", 600) >= 600
        assert anchor_of(cache, list(range(100)), "stays") == 100


def test_room_is_made_from_cleared_data_first() -> None:
    with opened("full") as cache:
        cache.evictor.sweeper.n_steps = 8
        cache.finish(run(cache, TokenKey(PROMPT[:16], "stays")))
        for last in range(2):
            cache.finish(run(cache, TokenKey([*PROMPT, last], "goes")))
        cache.drain()
        cache.evictor.sweeper.n_steps = 1
        assert not cache.clear("goes").complete
        cache.evictor.sweeper.n_steps = 8
        free = cache.tree.by_name["full"].device.free
        assert cache.evict("full", 4) >= 4
        assert cache.tree.by_name["full"].device.free >= free + 4
        evicted = cache.stats().components["full"].device.evicted
        assert [cause for cause, n_slots in evicted.items() if n_slots] == ["cleared"]


def test_room_for_a_state_is_made_from_cleared_data_though_few_nodes_have_one() -> None:
    parts: dict[str, Any] = {"full": {}, "mamba": {"states": 16}}
    with Cache.open(parts, page_size=1, device_tokens=4000, policy="lru", **BARE) as cache:
        states = cache.tree.component("mamba").device
        for first in range(150):
            cache.finish(run(cache, TokenKey([first, 1, 2, 3], "goes")))
        for first in range(4):
            cache.finish(run(cache, TokenKey([1000 + first, *range(5)], "stays")))
        for last in range(10):
            cache.finish(run(cache, TokenKey([0, 1, 2, 3, last, 7], "goes")))
        live = [anchor_of(cache, [1000 + first, *range(5)], "stays") for first in range(4)]
        assert any(live)
        assert not states.free
        cache.clear("goes")
        cache.finish(run(cache, TokenKey([3000, 1, 2], "stays")))
        after = [anchor_of(cache, [1000 + first, *range(5)], "stays") for first in range(4)]
        assert after == live


def test_transfers_in_flight_end_first() -> None:
    engine = SteppedTransferEngine()
    with opened("full", engine=engine) as cache:
        for length in (16, 32):
            cache.finish(run(cache, TokenKey(PROMPT[:length])))
        assert cache.stats().backups.in_flight
        told = cache.clear()
        assert told.held_device["full"]
        assert anchor_of(cache, PROMPT) == 0
        engine.run_all()
        cache.poll()
        assert is_empty(cache)
        assert cache.stats().backups.failed == 0
        cache.check_integrity()


def test_readers_of_events_are_notified_at_once_also_of_held_data() -> None:
    residency = Residency()
    with opened() as cache:
        server, stream = Server(cache), cache.events()
        server.serve(PROMPT)
        held = run(cache, TokenKey([*PROMPT, 1]))
        cache.finish(run(cache, TokenKey(PROMPT, "tenant")))
        cache.drain()
        residency.apply(stream.take())
        cache.clear(None)
        events = stream.take()
        assert {event.cause for event in events if isinstance(event, Evicted)} == {"cleared"}
        residency.apply(events)
        here = Residency()
        with_tenant = cache.events()
        here.apply(with_tenant.take())
        assert residency.pages == here.pages
        assert residency.pages["full", Tier.DEVICE]
        cache.clear()
        assert stream.take() == [Cleared(0)]
        cache.finish(held)
        cache.drain()
        assert not stream.take()
        cache.check_integrity()


def test_storage_keeps_its_data_and_a_prefetch_under_way_brings_none() -> None:
    shelf = stocked(SETUPS["full"], PROMPT)
    with open_cache(SETUPS["full"], shelf) as cache:
        tier = tier_of(cache)
        shelf.gate.clear()
        key = TokenKey([*PROMPT, 1])
        prefetch = tier.prefetch(key)
        assert tier.n_in_flight
        cache.clear()
        assert prefetch.reason == "the cache was cleared"
        shelf.gate.set()
        assert cache.drain()
        assert cache.begin(key, prefetch=prefetch).anchor_tokens == 0
        again = tier.prefetch(key)
        assert cache.drain()
        assert cache.begin(key, prefetch=again).anchor_tokens == 0, "the store has older data"


def test_cleared_data_is_not_stored_any_more() -> None:
    shelf = Shelf()
    engine = SteppedTransferEngine()
    with open_cache(SETUPS["full"], shelf, engine=engine) as cache:
        cache.finish(run(cache, TokenKey(PROMPT)))
        cache.clear()  # while copies to HOST are on their way, and then on to the store
        engine.run_all()
        cache.drain()
        assert not shelf.stored
        assert is_empty(cache)


def test_cleared_data_that_is_evicted_is_not_stored() -> None:
    shelf, policy = Shelf(), settings(store=StorePolicy.HOST_EVICTION)
    with open_cache(SETUPS["full"], shelf, storage=policy) as cache:
        cache.finish(run(cache, TokenKey(PROMPT)))
        cache.drain()
        cache.evictor.sweeper.n_steps = 0
        assert not cache.clear().complete
        assert cache.evict("full", 4, Tier.HOST) >= 4
        assert cache.drain()
        assert not shelf.stored


def test_bad_input_is_refused() -> None:
    with opened() as cache, pytest.raises(ConfigError, match="is a float"):
        cache.clear(1.5)
    with pytest.raises(LeaseError, match="the cache is closed; open another"):
        cache.clear()
