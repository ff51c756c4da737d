"""Prefetches among requests, backups and one another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvgraft import ConfigError, Reach, Tier, TokenKey, Trailing, WritePolicy
from kvgraft_testing.machine import Sizes, references, setup_for
from kvgraft_testing.machine.engines import Wait
from kvgraft_testing.machine.harness import Harness
from kvgraft_testing.machine.prefetches import Fetched
from kvgraft_testing.stepped import SteppedTransferEngine

from ..serving.components import PagedPackage
from ..serving.server import Server
from ..serving.setups import installed, mixed
from .shelf import Shelf, drained, open_cache, settings, stocked, tier_of, until

PROMPT = list(range(100, 133))
FULL = installed("full")
LARGE: dict[str, Any] = {"device_tokens": 256, "host_tokens": 512}


def test_namespaces_that_were_only_looked_for_leave_nothing() -> None:
    cache = open_cache(FULL, Shelf(), **LARGE)
    for tenant in range(5):
        drained(cache, tier_of(cache).prefetch(TokenKey(PROMPT, namespace=tenant)))
    assert not cache.tree.roots
    cache.close()


def test_a_prefetch_that_shared_an_empty_fetch_starts_its_own() -> None:
    """Two prompts begin with the same page, and only one of them is stored."""
    missing, there = [*range(2), *range(500, 531)], [*range(2), *range(600, 631)]
    cache = open_cache(FULL, stocked(FULL, there), settings(threshold_tokens=8), **LARGE)
    first = tier_of(cache).prefetch(TokenKey(missing))
    second = tier_of(cache).prefetch(TokenKey(there))
    assert second.shared
    drained(cache, second)
    assert (first.gained_tokens, second.gained_tokens) == (0, 32)
    cache.close()


def test_pages_that_a_backup_brings_at_the_same_time_are_kept_once() -> None:
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
    assert cache.tree.components[0].host is not None
    assert cache.tree.components[0].host.pinned == 16
    tier_of(cache).cancel(prefetch)
    assert cache.tree.components[0].host.evictable == 16
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


def test_fetched_pages_are_inserted_below_pages_being_loaded_back() -> None:
    """Since the fetch began, half of it was computed, left DEVICE, and is on its way back there."""
    engine, shelf = SteppedTransferEngine(), stocked(FULL, PROMPT)
    cache = open_cache(FULL, shelf, engine=engine, **LARGE)
    tier, server = tier_of(cache), Server(cache)
    shelf.gate.clear()
    prefetch = tier.prefetch(TokenKey(PROMPT))
    until(lambda: tier.prefetching.nbytes_in_flight, cache)
    request = server.start(PROMPT[:17])
    server.prefill(request)
    cache.finish(request)
    engine.run_all()
    cache.poll()
    server.empty_device()
    request = cache.begin(TokenKey(PROMPT[:18]))
    assert cache.admit(request).admitted
    assert cache.load_back(request)
    shelf.gate.set()
    until(lambda: prefetch.ended, cache)
    assert prefetch.gained_tokens == 32
    engine.run_all()
    cache.poll()
    server.prefill(request)
    cache.abort(request)
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
    host = cache.tree.components[0].pool(Tier.HOST)
    before = host.evicted.copy()
    prefetch = tier_of(cache).prefetch(TokenKey(PROMPT))
    until(lambda: prefetch.waits, cache)
    assert "mamba needs 1 slots and has 0" in prefetch.reason
    assert host.evicted == before
    for holder in holders:
        cache.abort(holder)
    assert drained(cache, prefetch).gained_tokens == 32
    cache.close()


def test_two_components_of_one_name_in_storage_are_refused() -> None:
    """A component with two slots a page has a name for each; another's may be one of them."""
    setup = mixed(
        ("full",),
        PagedPackage("x", Reach(Trailing(8)), slots_per_page=2),
        PagedPackage("x:0", Reach(Trailing(8))),
    )
    with pytest.raises(ConfigError, match="'x:0' names data of two components"):
        setup.open(storage=settings(), **LARGE)


@pytest.mark.parametrize("prefetch", ["wait-complete", "timeout"])
def test_a_call_that_outlasts_its_deadline_holds_up_nobody(prefetch: str) -> None:
    """The store writes to HOST directly, and hangs; its slots come back when it does."""
    shelf = stocked(FULL, PROMPT, synchronous=True)
    given = settings(prefetch=prefetch, deadline_s=0.05, prefetch_timeout_s=5.0)
    cache = open_cache(FULL, shelf, given, **LARGE)
    shelf.gate.clear()
    first = tier_of(cache).prefetch(TokenKey(PROMPT))
    until(lambda: first.ended, cache)
    assert "did not answer in time" in first.reason
    assert tier_of(cache).prefetching.nbytes_in_flight, "it may still be written to"
    second = tier_of(cache).prefetch(TokenKey([*PROMPT[:10], *range(900, 930)]))
    assert not second.shared
    shelf.gate.set()
    assert cache.drain()
    assert not tier_of(cache).prefetching.nbytes_in_flight
    cache.check_integrity()
    cache.close()


def test_requests_of_which_nothing_is_stored_do_not_wait_for_one_another() -> None:
    cache = open_cache(FULL, Shelf(), settings(threshold_tokens=8), **LARGE)
    keys = [TokenKey([*range(2), *range(start, start + 31)]) for start in range(500, 2100, 100)]
    waiting = [tier_of(cache).prefetch(key) for key in keys]
    assert all(prefetch.shared for prefetch in waiting[1:])
    until(lambda: waiting[0].ended, cache)
    cache.poll()
    assert all(prefetch.ended for prefetch in waiting), "the page that they share is not stored"
    drained(cache, waiting[-1])
    cache.close()


def test_a_key_that_is_cut_while_its_prefetch_waits_is_looked_for_as_it_is_now() -> None:
    shelf = stocked(FULL, PROMPT)
    cache = open_cache(FULL, shelf, **LARGE)
    shelf.gate.clear()
    first = tier_of(cache).prefetch(TokenKey(PROMPT))
    until(lambda: shelf.n_calls, cache)
    longer = TokenKey([*PROMPT, *range(900, 950)])
    second = tier_of(cache).prefetch(longer)
    longer.truncate(20)
    shelf.gate.set()
    assert drained(cache, first).gained_tokens == 32
    assert second.ended
    cache.close()


def test_a_prefetch_goes_on_with_the_tokens_that_its_key_had() -> None:
    """Its pages arrive under those, also where the key is cut and goes on differently (T11)."""
    shelf = stocked(FULL, PROMPT)
    cache = open_cache(FULL, shelf, **LARGE)
    shelf.gate.clear()
    key = TokenKey(PROMPT)
    prefetch = tier_of(cache).prefetch(key)
    until(lambda: shelf.n_calls, cache)
    for token in (900, 901):
        key.truncate(8)
        key.extend([token] * (len(PROMPT) - 8))
    shelf.gate.set()
    assert drained(cache, prefetch).gained_tokens == 8  # of the key as it is now
    for given, found in ((TokenKey([*PROMPT, 1]), 32), (key, 8)):
        request = cache.begin(given)
        assert request.anchor_tokens == found
        cache.abort(request)
    cache.close()


@pytest.mark.parametrize("n_kinds", [1, 2, 3])
def test_data_on_its_way_out_of_device_is_not_adopted_from_the_store(n_kinds: int) -> None:
    """Nobody could load it back while its copy to HOST is under way (M4, R1)."""
    setup = replace(setup_for(references()[:n_kinds]), stored=True)
    harness = Harness(setup, Sizes(2, WritePolicy.WRITE_BACK, None, 20, 20))
    rooms, fetches, tokens = harness.rooms, harness.prefetches, tuple(range(12))

    def serve(prefetch: Fetched | None = None) -> None:
        asked = (*tokens, 1) if prefetch is not None else tokens
        live = harness.begin(None, asked, 0, None, fetched=prefetch)
        assert harness.admit(live).admitted
        harness.load_back(live)
        rooms.step_all()
        harness.prefill_all(live)
        harness.finish(live)

    serve()
    rooms.squeeze()
    rooms.step_all()
    fetches.settle()
    rooms.clear_host()
    fetches.settle()
    fetched = fetches.start((None, (*tokens, 1)))
    fetches.answer_until("get")
    serve()
    rooms.expect_waits([Wait.TIMES_OUT] * 9)
    rooms.evict(harness.model.components[0], 3, Tier.DEVICE)
    assert harness.bench.engine.pending, "nothing is on its way to HOST"
    fetches.settle()
    serve(fetched)
    harness.close()
