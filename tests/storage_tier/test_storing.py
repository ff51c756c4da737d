"""Which data goes to a store, when, and how often."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvgraft import Tier, TokenKey, WritePolicy
from kvgraft.cache import Cache
from kvgraft_storage import Status, Value
from kvgraft_storage.settings import StorePolicy
from kvgraft_storage.tier.storing import FULL_S

from ..serving.own_parts import clocked_parts
from ..serving.server import Server, ledgers
from ..serving.setups import SETUPS, Setup, installed, one_of_each_kind
from ..storage.backends import Raising
from .shelf import Shelf, addresses, open_cache, settings, tier_of, until

PROMPT = list(range(100, 133))
FULL = installed("full")
HYBRID = installed("full", "swa", "mamba")


class Ledger(Shelf):
    """Notes every key that is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.sets: list[bytes] = []

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.sets += keys
        return super().set_from(keys, values, deadline_s)


def opened(setup: Setup, shelf: Shelf, store: StorePolicy, **options: Any) -> Server:
    sizes: dict[str, Any] = {"device_tokens": 256, "host_tokens": 512, **options}
    return Server(open_cache(setup, shelf, settings(store=store), **sizes))


def keys_of(cache: Cache, prompt: Sequence[int], component: str) -> set[bytes]:
    return {each.key for page in addresses(cache, prompt, component) for each in page}


def close(server: Server) -> None:
    server.cache.drain()
    server.cache.check_integrity()
    server.cache.close()


@pytest.mark.parametrize("setup", one_of_each_kind())
@pytest.mark.parametrize("write", list(WritePolicy))
def test_data_used_once_is_not_written_to_disk(setup: Setup, write: WritePolicy) -> None:
    shelf = Ledger()
    server = opened(setup, shelf, StorePolicy.SECOND_TOUCH, policy=write, host_tokens=64)
    for start in range(1000, 1200, 40):
        server.serve(range(start, start + 33))
        server.empty_device()
    close(server)
    assert not shelf.sets


@pytest.mark.parametrize("setup", one_of_each_kind())
@pytest.mark.parametrize("write", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE])
def test_data_used_twice_is_stored_once(setup: Setup, write: WritePolicy) -> None:
    shelf = Ledger()
    server = opened(setup, shelf, StorePolicy.SECOND_TOUCH, policy=write)
    server.serve(PROMPT)
    assert not shelf.sets
    for tail in range(3):
        server.serve([*PROMPT, 7000 + tail])
    base = server.cache.tree.components[0]
    reused = PROMPT[:32]
    wanted = keys_of(server.cache, reused, base.name)
    if base.is_prefix_closed:
        assert wanted <= {*shelf.sets}
    assert {*shelf.sets} & keys_of(server.cache, reused, server.cache.tree.components[-1].name)
    assert len(shelf.sets) == len({*shelf.sets})
    close(server)


def test_the_prefix_of_data_used_twice_is_stored_with_it() -> None:
    """Four nodes on the way, each inserted by a request of its own; only the last is hit."""
    shelf = Ledger()
    server = opened(FULL, shelf, StorePolicy.SECOND_TOUCH)
    request = server.start(PROMPT, chunk=8)
    while request.computed < request.prompt:
        server.step(request, server.cache.next_chunk(request))
        server.cache.checkpoint(request)
    server.cache.finish(request)
    assert server.cache.drain()
    assert not shelf.sets
    server.serve([*PROMPT, 1])
    assert {*shelf.sets} == keys_of(server.cache, PROMPT, "full")
    close(server)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_write_through_stores_data_that_host_acknowledged(setup: Setup) -> None:
    shelf = Ledger()
    server = opened(setup, shelf, StorePolicy.WRITE_THROUGH)
    server.serve(PROMPT)
    held = sum(
        component.host.evictable + component.host.pinned
        for component in server.cache.tree.components
        if component.host is not None
    )
    assert len(shelf.sets) == len({*shelf.sets}) == held
    server.serve([*PROMPT[:20], 3, 4, 5])
    assert len(shelf.sets) == len({*shelf.sets})
    close(server)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_host_eviction_frees_slots_at_once_and_stores_a_copy(setup: Setup) -> None:
    shelf = Ledger()
    server = opened(setup, shelf, StorePolicy.HOST_EVICTION)
    cache = server.cache
    server.serve(PROMPT)
    server.empty_device()
    assert not shelf.sets
    shelf.gate.clear()
    for component in cache.tree.components:
        assert component.host is not None
        cache.evict(component.name, component.host.capacity, Tier.HOST)
        assert component.host.free == component.host.capacity
    shelf.gate.set()
    assert cache.drain()
    for component in cache.tree.components:
        assert {*shelf.sets} & keys_of(cache, PROMPT, component.name)
    key = TokenKey(PROMPT)
    prefetch = tier_of(cache).prefetch(key)
    assert cache.drain()
    request = cache.begin(key, prefetch=prefetch)
    assert request.storage_tokens == 32
    assert cache.admit(request).admitted
    server.load_back(request)
    server.prefill(request)
    cache.finish(request)
    close(server)


def test_copies_of_data_that_leaves_host_are_bounded() -> None:
    shelf = Ledger()
    size = FULL.open().mounted[0].component.host.slab_nbytes  # type: ignore[union-attr]
    cache = open_cache(
        FULL,
        shelf,
        settings(store=StorePolicy.HOST_EVICTION, store_nbytes=2 * size),
        device_tokens=256,
        host_tokens=512,
    )
    server = Server(cache)
    for start in range(0, 1000, 100):
        server.serve(range(start, start + 3))
    server.empty_device()
    shelf.gate.clear()
    cache.evict("full", 256, Tier.HOST)
    tier = tier_of(cache)
    assert tier.storing.nbytes_in_flight == 2 * size
    assert tier.counts()["store dropped, too many in flight"] == 8
    shelf.gate.set()
    close(server)
    assert len(shelf.sets) == 2


def test_data_on_its_way_to_the_store_stays_on_host_and_is_noted_on_both_parts_of_a_split() -> None:
    shelf = Ledger()
    server = opened(HYBRID, shelf, StorePolicy.WRITE_THROUGH)
    cache = server.cache
    shelf.gate.clear()
    request = server.start(PROMPT)
    server.prefill(request)
    cache.finish(request)
    assert cache.journal.drain(10)
    until(lambda: tier_of(cache).storing.counts["nodes"] == 2, cache)
    server.empty_device()
    for component in cache.tree.components:
        cache.evict(component.name, 512, Tier.HOST)
        assert component.host is not None
        assert component.host.pinned
    cache.check_integrity()
    fork = cache.begin(TokenKey([*PROMPT[:10], 1, 2, 3]))
    cache.abort(fork)
    shelf.gate.set()
    assert cache.drain()
    stored = {node.start: node.names.stored for node in cache.tree.nodes() if node.names}
    full, swa, mamba = (1 << component.index for component in cache.tree.components)
    deepest = max(stored)
    assert len(stored) >= 2
    assert all(mask & full for mask in stored.values())
    assert stored[deepest] == full | swa | mamba
    assert not any(mask & mamba for start, mask in stored.items() if start != deepest)
    close(server)


def test_data_that_a_failing_store_refused_is_stored_when_it_is_back() -> None:
    backend = Raising()
    backend.fault = OSError("no")
    cache = open_cache(FULL, backend, settings(), device_tokens=256, host_tokens=512)
    tier = tier_of(cache)
    server = Server(cache)
    before = ledgers(cache)
    broken, backend.set_from = backend.set_from, _raise  # type: ignore[method-assign, assignment]
    for start in range(0, 500, 100):
        server.serve(range(start, start + 5))
    until(lambda: tier.counts().get("set.down"), cache)
    assert not backend.stored
    cache.check_integrity()
    backend.set_from = broken  # type: ignore[method-assign]
    until(lambda: len(backend.stored) == 10, cache)
    for component in cache.tree.components:
        cache.evict(component.name, 512)
        cache.evict(component.name, 512, Tier.HOST)
    assert ledgers(cache) == before
    close(server)


def _raise(*given: object) -> Sequence[Status]:
    raise OSError("the store is gone")


def test_data_from_the_store_is_not_stored_again() -> None:
    shelf = Ledger()
    server = opened(HYBRID, shelf, StorePolicy.WRITE_THROUGH)
    server.serve(PROMPT)
    close(server)
    again = opened(HYBRID, shelf, StorePolicy.WRITE_THROUGH)
    n_sets, n_calls = len(shelf.sets), shelf.n_calls
    tier = tier_of(again.cache)
    prefetch = tier.prefetch(TokenKey(PROMPT))
    assert again.cache.drain()
    assert prefetch.gained_tokens == 32
    again.cache.abort(again.cache.begin(TokenKey(PROMPT), prefetch=prefetch))
    assert again.cache.drain()
    assert len(shelf.sets) == n_sets
    assert shelf.n_calls == n_calls + 1, "one fetch"
    assert not tier.counts().get("store nodes"), "and not even a question about storing"
    close(again)


@pytest.mark.parametrize("store", [StorePolicy.WRITE_THROUGH, StorePolicy.SECOND_TOUCH])
def test_a_node_that_is_split_before_its_turn_is_stored_whole(store: StorePolicy) -> None:
    shelf = Ledger()
    server = opened(FULL, shelf, store)
    cache = server.cache
    request = server.start(PROMPT)
    server.prefill(request)
    cache.finish(request)
    cache.journal.drain(10)
    if store is StorePolicy.SECOND_TOUCH:
        cache.abort(cache.begin(TokenKey([*PROMPT, 1])))
    cache.abort(cache.begin(TokenKey([*PROMPT[:10], 1, 2])))
    assert cache.tree.n_nodes == 2
    assert cache.drain()
    assert {*shelf.sets} == keys_of(cache, PROMPT, "full")
    close(server)


def on_its_way(shelf: Ledger, store: StorePolicy = StorePolicy.WRITE_THROUGH) -> Cache:
    """The store hangs while it is sent a prompt's data."""
    server = opened(FULL, shelf, store)
    cache = server.cache
    shelf.gate.clear()
    request = server.start(PROMPT)
    server.prefill(request)
    cache.finish(request)
    cache.journal.drain(10)
    if store is StorePolicy.SECOND_TOUCH:
        use(cache)
    until(lambda: shelf.n_calls, cache)
    return cache


def use(cache: Cache) -> None:
    cache.abort(cache.begin(TokenKey([*PROMPT, 1])))
    cache.poll()


@pytest.mark.parametrize("store", [StorePolicy.WRITE_THROUGH, StorePolicy.SECOND_TOUCH])
def test_data_on_its_way_to_the_store_is_not_sent_again(store: StorePolicy) -> None:
    shelf = Ledger()
    cache = on_its_way(shelf, store)
    cache.abort(cache.begin(TokenKey([*PROMPT[:10], 1, 2])))  # cuts the node
    for _ in range(2):
        use(cache)
    assert tier_of(cache).counts()["store nodes"] == 1
    cache.abort(cache.begin(TokenKey(PROMPT)))
    assert tier_of(cache).storing.n_in_flight == 1, "nor is it queued"
    shelf.gate.set()
    cache.close()


def test_data_on_its_way_during_a_clear_is_sent_on_its_next_use() -> None:
    shelf = Ledger()
    cache = on_its_way(shelf)
    cleared = tier_of(cache).clear()
    until(lambda: cleared.done, cache)
    cache.poll()
    use(cache)
    shelf.gate.set()
    assert cache.drain()
    use(cache)
    assert cache.drain()
    assert tier_of(cache).counts()["store nodes"] == 2
    cache.close()


@pytest.mark.parametrize("drained", [True, False])
def test_data_on_its_way_to_host_when_a_store_is_detached_is_counted(*, drained: bool) -> None:
    shelf = Ledger()
    server = opened(FULL, shelf, StorePolicy.WRITE_THROUGH)
    cache = server.cache
    request = cache.begin(TokenKey(range(1000, 1033)))
    assert cache.admit(request).admitted
    server.load_back(request)
    server.prefill(request)
    cache.finish(request)
    if drained:
        assert cache.drain()
    gone = tier_of(cache).detach()
    until(lambda: gone.done, cache)
    assert cache.drain()
    counts = tier_of(cache).counts()
    kept, dropped = counts.get("store nodes", 0), counts.get("store dropped, no store", 0)
    assert (kept, dropped) == ((1, 0) if drained else (0, 1))
    cache.close()


def test_a_store_that_is_detached_while_it_hangs_holds_nothing_on_host() -> None:
    shelf = Ledger()
    cache = on_its_way(shelf)
    host = cache.tree.components[0].host
    assert host is not None
    assert host.pinned == 16
    gone = tier_of(cache).detach()
    cache.poll()
    assert (host.pinned, gone.done) == (0, False)
    shelf.gate.set()
    until(lambda: gone.done, cache)
    cache.close()


class Moody(Ledger):
    """Answers `mood` to every write, while there is one."""

    mood: Status | None = None

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        if self.mood is not None:
            self.n_calls += 1
            return [self.mood] * len(keys)
        return super().set_from(keys, values, deadline_s)


class Clock:
    """Real time, and `ahead_s` seconds more."""

    ahead_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.mark.parametrize("store", [StorePolicy.WRITE_THROUGH, StorePolicy.SECOND_TOUCH])
def test_data_that_a_full_store_refused_is_offered_again_on_its_next_use(
    store: StorePolicy,
) -> None:
    shelf, clock = Moody(), Clock()
    server = opened(FULL, shelf, store, parts=clocked_parts(clock))
    shelf.mood = Status.FULL
    server.serve(PROMPT)
    server.serve([*PROMPT, 1])
    assert not shelf.stored
    calls = shelf.n_calls
    server.serve([*PROMPT, 1])
    assert shelf.n_calls == calls, "not at once"
    clock.ahead_s = FULL_S
    shelf.mood = None
    server.serve([*PROMPT, 2])
    assert {*shelf.sets} >= keys_of(server.cache, PROMPT, "full")
    close(server)


def test_a_store_that_works_but_for_some_keys_is_not_asked_all_the_time() -> None:
    shelf = Moody()
    frozen = clocked_parts(lambda: 1e9)
    server = opened(FULL, shelf, StorePolicy.WRITE_THROUGH, parts=frozen)
    shelf.mood = Status.TIMEOUT
    calls = shelf.n_calls
    server.serve(range(500, 533))
    for _ in range(3):
        assert server.cache.drain()
    assert shelf.n_calls == calls + 2, "once more, and not again while time stands still"
    shelf.mood = None
    close(server)


class SlowToClear(Ledger):
    """Clears once it is told to; data stored meanwhile goes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def clear(self) -> None:
        self.told.wait(10)
        super().clear()


def test_data_stored_while_a_store_is_cleared_counts_as_gone() -> None:
    shelf = SlowToClear()
    server = opened(FULL, shelf, StorePolicy.WRITE_THROUGH)
    ticket = tier_of(server.cache).clear()
    server.serve(PROMPT)
    assert shelf.stored
    shelf.told.set()
    until(lambda: ticket.done, server.cache)
    server.cache.poll()
    assert not shelf.stored
    server.serve([*PROMPT, 1])
    assert shelf.stored.keys() >= keys_of(server.cache, PROMPT, "full")
    close(server)
