"""Prefetches among requests, backups and one another."""

from __future__ import annotations

from kvgraft import TokenKey
from kvgraft.transfers import SteppedTransferEngine

from ..serving.server import Server
from ..serving.setups import installed
from .shelf import Shelf, drained, open_cache, settings, stocked, tier_of, until

PROMPT = list(range(100, 133))
FULL = installed("full")
LARGE = {"device_tokens": 256, "host_tokens": 512}


def test_namespaces_that_were_only_looked_for_leave_nothing() -> None:
    cache = open_cache(FULL, Shelf(), **LARGE)
    for tenant in range(5):
        drained(cache, tier_of(cache).prefetch(TokenKey(PROMPT, namespace=tenant)))
    assert not cache.tree.roots
    cache.close()


def test_who_shared_a_fetch_that_brought_nothing_looks_for_its_own() -> None:
    """Two prompts begin with the same page, and only one of them is stored."""
    missing, there = [*range(2), *range(500, 531)], [*range(2), *range(600, 631)]
    cache = open_cache(FULL, stocked(FULL, there), settings(threshold_tokens=8), **LARGE)
    first = tier_of(cache).prefetch(TokenKey(missing))
    second = tier_of(cache).prefetch(TokenKey(there))
    assert second.shared
    drained(cache, second)
    assert (first.gained_tokens, second.gained_tokens) == (0, 32)
    cache.close()


def test_what_a_backup_brings_at_the_same_time_is_kept_once() -> None:
    engine = SteppedTransferEngine()
    cache = open_cache(FULL, stocked(FULL, PROMPT), engine=engine, **LARGE)
    server = Server(cache)
    prefetch = tier_of(cache).prefetch(TokenKey(PROMPT))
    request = server.start(PROMPT[:9])
    server.prefill(request)
    cache.finish(request)
    assert engine.pending, "a backup of the first pages is on its way"
    until(lambda: prefetch.ended, cache)
    assert cache.explain(TokenKey(PROMPT)).anchor == 32
    cache.check_integrity()
    engine.run_all()
    assert cache.drain()
    assert cache.tree.tracks[0].host is not None
    assert cache.tree.tracks[0].host.evictable == 16
    server.empty_device()
    again = cache.begin(TokenKey(PROMPT))
    assert cache.admit(again).admitted
    cache.load_back(again)
    engine.run_all()
    cache.poll()
    server.prefill(again)
    cache.finish(again)
    engine.run_all()
    assert cache.drain()
    cache.check_integrity()
    cache.close()


def test_nothing_is_evicted_for_a_prefetch_that_cannot_be() -> None:
    """Every state slot is pinned by somebody; the pages have room to be made."""
    setup = installed("full", "mamba")
    cache = open_cache(
        setup,
        stocked(setup, PROMPT),
        device_tokens=256,
        host_tokens=40,
        mamba={"host_states": 3},
    )
    server = Server(cache)
    for start in (700, 800, 900):
        server.serve(range(start, start + 3))
    server.empty_device()
    holders = [cache.begin(TokenKey(range(start, start + 4))) for start in (700, 800, 900)]
    assert all(holder.anchor_tokens == 2 for holder in holders)
    server.serve(range(500, 525))
    before = cache.tree.tracks[0].host_evictions.copy()
    prefetch = drained(cache, tier_of(cache).prefetch(TokenKey(PROMPT)))
    assert "mamba needs 1 slots and has 0" in prefetch.reason
    assert cache.tree.tracks[0].host_evictions == before
    for holder in holders:
        cache.abort(holder)
    cache.close()
