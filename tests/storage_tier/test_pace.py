"""A call of the cache takes a slice of time, and a slow store serves every prefetch (S6, S10)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from kvgraft import Leading, Reach, Tier, TokenKey, WritePolicy
from kvgraft.cache import Cache
from kvgraft_storage import BreakerState, Status, SupervisionLimits, Value
from kvgraft_storage.tier import StorageTier, fetching, inventory, naming
from kvgraft_storage.tier import tier as tier_module

from ..serving.components import PagedPackage
from ..serving.server import Server, ledgers
from ..serving.setups import SETUPS, Setup, installed, mixed
from .shelf import Shelf, drained, open_cache, settings, step_by_step, stocked, tier_of, until
from .troubles import Clock

FULL = installed("full")
HYBRID = installed("full", "swa", "mamba")
HEADED = mixed(("full",), PagedPackage("head", Reach(Leading(3))))
LARGE: dict[str, Any] = {"device_tokens": 1024, "host_tokens": 2048}
PROMPT = list(range(100, 165))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "PIECE_PAGES", 4)
    monkeypatch.setattr(fetching, "ASKED_PAGES", 4)
    monkeypatch.setattr(naming, "BLOCK_PAGES", 4)


@contextmanager
def stepping(setup: Setup, shelf: Shelf, **given: object) -> Iterator[Cache]:
    """A cache every call of which goes on by one step only."""
    cache = open_cache(setup, shelf, settings(**given), step_by_step(), **LARGE)
    try:
        yield cache
        assert cache.drain()
        cache.check_integrity()
    finally:
        shelf.gate.set()
        cache.close()


class Slow(Shelf):
    """Every call that reads takes half a second of the test's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self.gate.wait()
        self.clock.now += 0.5
        time.sleep(0.005)  # somebody looks at the clock meanwhile
        return super().exists(keys)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.clock.now += 0.5
        time.sleep(0.005)  # somebody looks at the clock meanwhile
        return super().get_into(keys, values, deadline_s)


def test_prefetches_that_wait_behind_a_slow_store_all_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call takes half a second, any may take two, and they take eight together."""
    one_worker = partial(SupervisionLimits, n_workers=1)  # nobody else moves the clock meanwhile
    monkeypatch.setattr(tier_module, "SupervisionLimits", one_worker)
    prompts = [list(range(start, start + 33)) for start in range(0, 800, 100)]
    clock = Clock()
    slow = Slow(clock)
    slow.stored.update(stocked(FULL, *prompts).stored)
    given = settings(deadline_s=2.0)
    cache = FULL.open(storage=given, **LARGE)
    cache.storage = cache.tier = StorageTier(cache.tree, cache.mounted, cache.evictor, given, clock)
    tier = cache.storage
    tier.attach(slow)
    slow.gate.clear()
    prefetches = [tier.prefetch(TokenKey(prompt)) for prompt in prompts]
    slow.gate.set()
    until(lambda: all(prefetch.ended for prefetch in prefetches), cache)
    assert [prefetch.gained_tokens for prefetch in prefetches] == [32] * 8
    assert tier.client.state is BreakerState.CLOSED
    cache.close()


def test_a_prefetch_hashes_a_long_prompt_bit_by_bit(hashed: Counter[tuple[bytes, bytes]]) -> None:
    with stepping(FULL, Shelf()) as cache:
        prefetch = tier_of(cache).prefetch(TokenKey(range(1801)))
        per_call = [len(hashed)]
        while not prefetch.ended:
            before = len(hashed)
            tier_of(cache).poll()
            per_call.append(len(hashed) - before)
    assert 0 < max(per_call) <= naming.BLOCK_PAGES
    assert set(hashed.values()) == {1}


def test_a_poll_says_whether_the_next_one_would_go_on() -> None:
    """An engine that has nothing else to do polls again at once, or waits for the store."""
    shelf = Shelf()
    shelf.gate.clear()
    with stepping(FULL, shelf) as cache:
        tier = tier_of(cache)
        prefetch = tier.prefetch(TokenKey(range(1801)))
        tier.poll()
        n_polls, busy = 1, tier.busy
        while tier.busy:
            tier.poll()
            n_polls += 1
        assert busy
        assert n_polls > 2  # its pages are named step by step; then the store is asked
        shelf.gate.set()
        until(lambda: prefetch.ended, cache)
        tier.poll()
        assert not tier.busy


def test_prompts_that_are_nowhere_share_the_hashes_of_their_common_prefix(
    hashed: Counter[tuple[bytes, bytes]],
) -> None:
    """Other namespaces have other names: nothing of theirs is taken (T11)."""
    common = range(8 * 2 * naming.BLOCK_PAGES)
    with stepping(FULL, Shelf()) as cache:
        for number in range(8):
            key = TokenKey([*common, *[5000 + number] * 20])
            prefetch = tier_of(cache).prefetch(key)
            until(lambda prefetch=prefetch: prefetch.ended, cache)  # type: ignore[misc]
        assert set(hashed.values()) == {1}
        n_pages = len(hashed)
        drained(cache, tier_of(cache).prefetch(TokenKey(common, "tenant")))
        assert len(hashed) >= n_pages + len(common) // 2 - 1


@pytest.mark.usefixtures("small_pieces")
def test_a_small_prefetch_is_not_behind_a_large_one() -> None:
    large, small = list(range(801)), list(range(5000, 5009))
    shelf = stocked(FULL, small)
    with stepping(FULL, shelf) as cache:
        tier = tier_of(cache)
        first, second = tier.prefetch(TokenKey(large)), tier.prefetch(TokenKey(small))
        begun = tier.prefetch(TokenKey(range(7000, 7801)))
        until(lambda: second.ended, cache)
        assert second.gained_tokens == 8
        tier.cancel(begun)
        drained(cache, first)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_pages_fetched_step_by_step_are_whole(setup: Setup) -> None:
    shelf = stocked(setup, PROMPT)
    with stepping(setup, shelf) as cache:
        server, key = Server(cache), TokenKey(PROMPT)
        prefetch = drained(cache, tier_of(cache).prefetch(key))
        request = cache.begin(key, prefetch=prefetch)
        assert request.storage_tokens == len(PROMPT) - 1
        assert cache.admit(request).admitted
        server.load_back(request)
        server.prefill(request)
        cache.finish(request)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("setup", [FULL, HYBRID], ids=["full", "hybrid"])
def test_pages_that_came_too_late_for_begin_are_inserted_later(setup: Setup) -> None:
    shelf = stocked(setup, PROMPT)
    with stepping(setup, shelf, prefetch="best-effort") as cache:
        prefetching, key = tier_of(cache).prefetching, TokenKey(PROMPT)
        prefetch = tier_of(cache).prefetch(key)
        until(lambda: any(f.phase is fetching.Phase.HANGING for f in prefetching._turns), cache)
        cache.poll()
        cache.poll()
        request = cache.begin(key, prefetch=prefetch)
        assert request.anchor_tokens < len(PROMPT) - 1
        cache.abort(request)
        assert prefetch.ended
        assert cache.drain()
        request = cache.begin(key)
        assert request.anchor_tokens == len(PROMPT) - 1
        cache.abort(request)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("n_polls", range(0, 60, 3))
def test_a_prefetch_that_is_cancelled_between_two_steps_holds_nothing(n_polls: int) -> None:
    shelf = stocked(HYBRID, PROMPT)
    with stepping(HYBRID, shelf) as cache:
        before = ledgers(cache)
        prefetch = tier_of(cache).prefetch(TokenKey(PROMPT))
        for _ in range(n_polls):
            cache.poll()
        tier_of(cache).cancel(prefetch)
        drained(cache, prefetch)
        for component in cache.tree.components:
            host = component.host
            assert host is not None
            assert host.pinned == host.in_flight == 0
        for _ in range(2):
            for component in cache.tree.components:
                cache.evict(component.name, 10_000, Tier.HOST)
        assert ledgers(cache) == before
        assert not cache.tree.roots


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("setup", [FULL, HEADED], ids=["full", "headed"])
def test_the_books_balance_between_any_two_steps(setup: Setup) -> None:
    """Pins of data being hung into the tree, and of data just stored, are counted."""
    shelf = stocked(setup, PROMPT)
    with stepping(setup, shelf) as cache:
        Server(cache).serve([*PROMPT[:9], *range(300, 320)])
        prefetch = tier_of(cache).prefetch(TokenKey(PROMPT))
        while not prefetch.ended or tier_of(cache).storing.n_in_flight:
            cache.poll()
            cache.check_integrity()
        assert prefetch.gained_tokens


def test_the_books_count_pins_of_stored_data_until_the_store_answers() -> None:
    shelf = Shelf()
    with stepping(FULL, shelf) as cache:
        storing = tier_of(cache).storing
        shelf.gate.clear()
        server = Server(cache)
        for start in (0, 100, 200):
            request = server.start(range(start, start + 9))
            server.prefill(request)
            cache.finish(request)
        until(lambda: len(storing._sent) == 3, cache)
        shelf.gate.set()
        until(lambda: all(sent.ticket.done for sent in storing._sent))
        cache.poll()
        assert storing._done  # one of them is taken in per step
        cache.check_integrity()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("setup", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_long_prefetch_is_planned_as_often_as_a_short_one(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not anew for every piece that is looked for or hung into the tree."""
    taken: list[int] = []
    take = inventory.take_inventory

    def counted(*given: Any, **named: Any) -> Any:
        taken[-1] += 1
        return take(*given, **named)

    monkeypatch.setattr(fetching, "take_inventory", counted)
    shelf = stocked(setup, PROMPT[:9], PROMPT)
    for n_tokens in (9, 65):
        taken.append(0)
        with stepping(setup, shelf.copy()) as cache:
            prefetch = drained(cache, tier_of(cache).prefetch(TokenKey(PROMPT[:n_tokens])))
            assert prefetch.gained_tokens == n_tokens - 1
    assert taken[0] == taken[1]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("setup", [FULL, HYBRID, HEADED], ids=["full", "hybrid", "headed"])
def test_a_call_counts_no_more_than_a_block_of_pages(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_call = [0]
    count = inventory.Inventory.count

    def counted(self: inventory.Inventory, low: int, lacking: Any, *given: Any) -> None:
        per_call[-1] += len(lacking[0])
        count(self, low, lacking, *given)

    monkeypatch.setattr(inventory, "PAGES_AT_ONCE", 8)
    monkeypatch.setattr(inventory.Inventory, "count", counted)
    with stepping(setup, stocked(setup, PROMPT)) as cache:
        prefetch = tier_of(cache).prefetch(TokenKey(PROMPT))
        while not prefetch.ended:
            per_call.append(0)
            tier_of(cache).poll()
        assert prefetch.gained_tokens == len(PROMPT) - 1
    assert max(per_call) == 8


@pytest.mark.usefixtures("small_pieces")
def test_a_node_that_is_there_is_not_cut_where_a_piece_ends() -> None:
    """A node on DEVICE stays one, though it comes to HOST in pieces."""
    cache = open_cache(FULL, stocked(FULL, [*PROMPT, 1, 2]), policy=WritePolicy.WRITE_BACK, **LARGE)
    Server(cache).serve(PROMPT)
    assert cache.tree.n_nodes == 1
    prefetch = drained(cache, tier_of(cache).prefetch(TokenKey([*PROMPT, 1, 2])))
    assert (prefetch.anchor_tokens, prefetch.gained_tokens) == (64, 2)
    assert cache.tree.n_nodes == 2
    cache.close()
