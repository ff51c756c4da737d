"""`Cache.stats` is typed, copied, and agrees with the requests and the ledgers."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import CacheStats, Tier, TokenKey
from kvgraft.cache import Cache
from kvgraft.stats import SlotHits, TokenStats
from kvgraft_storage.settings import PrefetchPolicy
from kvgraft_storage.stats import StorageStats

from ..serving.server import Server
from ..serving.setups import SETUPS, Setup, installed
from ..storage_tier.shelf import drained, open_cache, settings, stocked, tier_of

PROMPT = list(range(100, 133))
"""16 pages of 2 tokens, and one token more."""


def serve(cache: Cache, tokens: list[int] = PROMPT) -> None:
    Server(cache).serve(tokens)


def expect_books(cache: Cache, stats: CacheStats) -> None:
    """Its pools are the ledgers', and balance."""
    assert list(stats.components) == [each.name for each in cache.mounted]
    for component in cache.tree.components:
        of = stats.components[component.name]
        for ledger, pool in ((component.device, of.device), (component.host, of.host)):
            if ledger is None:
                assert pool is None
                continue
            assert pool is not None
            assert {"capacity": pool.capacity, **pool.owners} == ledger.counts()
            assert sum(pool.owners.values()) == pool.capacity
            assert (pool.promised, pool.headroom) == (ledger.promised, ledger.headroom)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_hits_are_counted_in_tokens_and_in_every_component_s_slots(setup: Setup) -> None:
    with setup.open() as cache:
        serve(cache)
        cold = cache.stats()
        assert cold.tokens == TokenStats(
            asked=33, device=0, host=0, storage=0, computed=33, recomputed=0
        )
        assert {of.hits for of in cold.components.values()} == {SlotHits(0, 0, 0)}

        request = Server(cache).start(PROMPT)
        warm = cache.stats()
        reused = request.anchor_tokens
        assert reused
        assert warm.tokens == TokenStats(
            asked=66, device=reused, host=0, storage=0, computed=33, recomputed=0
        )
        for component in cache.tree.components:
            pages = sum(len(range(*span)) for span in component.needed_pages(reused // 2))
            hits = SlotHits(pages * component.slots_per_page, 0, 0)
            assert warm.components[component.name].hits == hits
        assert (warm.requests.running, warm.requests.leased, warm.requests.admitted) == (1, 0, 2)
        expect_books(cache, warm)
        cache.abort(request)


@pytest.mark.parametrize("again", ["restart", "retract"])
def test_a_request_counts_once_and_what_it_lost_apart(again: str) -> None:
    with Cache.open(["full"], page_size=16, device_tokens=512) as cache:
        key = TokenKey(range(100))
        request = cache.begin(key)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 64)
        cache.computed(request, 64)
        if again == "restart":
            cache.restart(request)
        else:
            cache.retract(request)
            cache.clear()
            request = cache.begin(key)
        assert cache.admit(request).admitted
        tokens = cache.stats().tokens
        assert (tokens.asked, tokens.reused, tokens.recomputed) == (100, 0, 64)
        assert cache.stats().requests.admitted == 2
        cache.finish(request)
        next_turn = cache.begin(key)
        assert cache.admit(next_turn).admitted
        assert cache.stats().tokens.asked == 200, "a key of a request that finished counts again"


def test_data_at_home_on_host_that_goes_along_with_a_state_is_no_victim() -> None:
    components = {"hisparse": {"hot_tokens": 16, "max_running": 1}, "mamba": {"states": 4}}
    given: dict[str, Any] = {"page_size": 2, "device_tokens": 64, "host_tokens": 64}
    with Cache.open(components, write_policy="write-through", **given) as cache:
        serve(cache)
        cache.drain()
        assert cache.evict("mamba", 1, Tier.HOST)
        device = cache.stats().components["hisparse"].device
        assert (device.evicted["leaf"], device.evicted["deleted"]) == (16, 0)


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_evictions_and_load_backs_are_counted_by_component(setup: Setup) -> None:
    with setup.open() as cache:
        server = Server(cache)
        serve(cache)
        before = cache.stats()
        server.empty_device()
        gone = cache.stats()
        for name, of in gone.components.items():
            evicted = sum(of.device.evicted.values())
            assert evicted == of.device.free - before.components[name].device.free
            assert not any(before.components[name].device.evicted.values())

        request = server.start(PROMPT)
        back = cache.stats()
        assert back.tokens.host == request.anchor_tokens - request.device_tokens
        assert back.tokens.device == request.device_tokens
        loaded = {name: of.hits.host for name, of in back.components.items()}
        assert loaded == dict(back.load_backs.slots)
        assert any(loaded.values()) == bool(back.tokens.host)
        assert (back.load_backs.in_flight, back.load_backs.failed) == (0, 0)
        assert back.load_backs.started == back.load_backs.completed
        assert back.backups.completed == back.backups.started
        expect_books(cache, back)
        cache.abort(request)


def test_tokens_that_storage_brought_are_counted_apart() -> None:
    setup = installed("full", "swa", "mamba")
    shelf = stocked(setup, PROMPT)
    given = settings(prefetch=PrefetchPolicy.WAIT_COMPLETE)
    with open_cache(setup, shelf, given, device_tokens=256, host_tokens=512) as cache:
        key = TokenKey(PROMPT)
        prefetch = drained(cache, tier_of(cache).prefetch(key))
        request = cache.begin(key, prefetch=prefetch)
        assert cache.admit(request).admitted
        stats = cache.stats()
        assert stats.tokens.storage == stats.tokens.reused == request.storage_tokens == 32
        hits = {name: of.hits for name, of in stats.components.items()}
        assert hits["full"] == SlotHits(0, 0, 16)
        assert hits["mamba"] == SlotHits(0, 0, 1)
        assert hits["swa"].storage == request.components[1].host_slots > 0
        assert isinstance(stats.storage, StorageStats)
        assert stats.storage.prefetches["tokens"] == 32
        assert stats.storage.keys["get"]["ok"] > 0
        assert stats.storage.breaker == "closed"
        cache.abort(request)


def test_stats_are_a_copy() -> None:
    with SETUPS["full+swa+mamba"].open() as cache:
        serve(cache)
        before = cache.stats()
        said = repr(before)
        serve(cache, PROMPT[::-1])
        Server(cache).empty_device()
        assert repr(before) == said != repr(cache.stats())
