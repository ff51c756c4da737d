"""Limits of the storage tier: slots not promised, its share of bytes, few round trips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgraft import TokenKey, WritePolicy
from kvgraft.tree.ledger import Ledger

from ..serving.server import Server
from ..serving.setups import SETUPS, Setup, installed
from .shelf import Shelf, addresses, drained, open_cache, settings, stocked, tier_of, until

PROMPT = list(range(100, 133))
FULL = installed("full")
HISPARSE = SETUPS["hisparse"]
"""At home on HOST: a request's slots are promised there as well."""
LARGE: dict[str, Any] = {"device_tokens": 256, "host_tokens": 512}


def host_of(server: Server) -> Ledger:
    (ledger,) = server.cache.tree.components[0].hosts
    assert ledger is not None
    return ledger


def slab_nbytes(setup: Setup) -> list[int]:
    """Bytes of a HOST slot, per component."""
    cache = setup.open()
    found = [each.component.host.slab_nbytes for each in cache.mounted]  # type: ignore[union-attr]
    cache.close()
    return found


def spoil(shelf: Shelf, key: bytes) -> None:
    """The store goes on saying that it has it."""
    header, payload = shelf.stored[key]
    shelf.stored[key] = header, bytes(len(payload))


@pytest.mark.parametrize("old", [0, 5])
def test_a_prefetch_shrinks_to_the_slots_that_are_not_promised(old: int) -> None:
    """Free slots are not enough: an admitted request takes them later (A12)."""
    cache = open_cache(HISPARSE, stocked(HISPARSE, PROMPT), device_tokens=256, host_tokens=40)
    server = Server(cache)
    if old:
        server.serve(range(900, 901 + 2 * old))
    request = server.begin(range(500, 503), reserve=20)
    assert cache.admit(request).admitted
    host = host_of(server)
    room = host.headroom
    assert 0 < room < len(PROMPT) // 2 <= host.free + host.evictable
    prefetch = drained(cache, tier_of(cache).prefetch(TokenKey(PROMPT)))
    assert prefetch.gained_tokens == 2 * room
    assert (host.headroom, host.evictable) == (0, old), "nothing had to be evicted"
    tier_of(cache).cancel(prefetch)
    assert (host.headroom, host.evictable) == (room, old + room)
    server.prefill(request)
    server.decode(request, 20)
    cache.finish(request)
    cache.close()


def test_nothing_is_evicted_for_pages_beyond_the_share() -> None:
    """Another prefetch holds twelve of sixteen pages: room is needed for four, and is there."""
    other = list(range(200, 225))
    shelf, (size,) = stocked(FULL, PROMPT, other), slab_nbytes(FULL)
    given = settings(prefetch_nbytes=16 * size)
    cache = open_cache(FULL, shelf, given, device_tokens=256, host_tokens=64)
    tier, server = tier_of(cache), Server(cache)
    for start in range(500, 900, 100):
        server.serve(range(start, start + 9))
    shelf.gate.clear()
    tier.prefetch(TokenKey(other))
    until(lambda: host_of(server).in_flight == 12, cache)
    prefetch = tier.prefetch(TokenKey(PROMPT))
    until(lambda: host_of(server).in_flight == 16, cache)
    assert host_of(server).evictable == 16
    shelf.gate.set()
    assert drained(cache, prefetch).gained_tokens == 8
    cache.close()


@pytest.mark.parametrize("setup", [FULL, installed("full", "swa", "mamba")], ids=["full", "hybrid"])
def test_a_prefetch_that_the_share_cuts_says_so(setup: Setup) -> None:
    prompt = list(range(100, 165))
    nbytes = 20 * slab_nbytes(setup)[0]
    shelf = stocked(setup, prompt, chunk=8)
    cache = open_cache(setup, shelf, settings(prefetch_nbytes=nbytes), **LARGE)
    tier = tier_of(cache)
    prefetch = drained(cache, tier.prefetch(TokenKey(prompt)))
    assert prefetch.capped
    assert (prefetch.asked_tokens, prefetch.planned_tokens) == (64, 40)
    assert 0 < prefetch.gained_tokens <= 40
    said = "complete, capped by prefetch_nbytes; 64 were asked for"
    assert said in str(prefetch)
    assert said in cache.explain(prefetch.key, prefetch).storage
    assert tier.counts()["prefetch capped"] == 1
    tier.cancel(prefetch)
    rest = drained(cache, tier.prefetch(TokenKey(prompt)))
    assert rest.anchor_tokens == prefetch.tokens, "another goes on from there"
    shelf = stocked(setup, prompt[:25], chunk=8)
    short = open_cache(setup, shelf, settings(prefetch_nbytes=nbytes), **LARGE)
    whole = drained(short, tier_of(short).prefetch(TokenKey(prompt)))
    assert not whole.capped, "the store has no more"
    assert "capped" not in str(whole)
    for each in (cache, short):
        each.close()


def test_a_prefetch_that_the_share_cuts_before_the_first_state_says_so() -> None:
    setup, prompt = installed("full", "mamba"), list(range(100, 165))
    shelf = stocked(setup, prompt, chunk=64)
    share = settings(prefetch_nbytes=20 * slab_nbytes(setup)[0])
    cache = open_cache(setup, shelf, share, **LARGE)
    tier = tier_of(cache)
    prefetch = drained(cache, tier.prefetch(TokenKey(prompt)))
    assert (prefetch.gained_tokens, prefetch.capped) == (0, True)
    assert "stored, capped by prefetch_nbytes; 64 were asked for" in str(prefetch)
    assert tier.counts()["prefetch capped"] == 1
    cache.close()


@pytest.mark.parametrize(("slabs", "left"), [(0.5, 0), (3, 6)])
def test_a_prefetch_for_which_the_share_leaves_less_than_the_threshold_says_so(
    slabs: float, left: int
) -> None:
    prompt = list(range(100, 165))
    share = settings(prefetch_nbytes=int(slabs * slab_nbytes(FULL)[0]), threshold_tokens=8)
    cache = open_cache(FULL, stocked(FULL, prompt, chunk=8), share, **LARGE)
    prefetch = drained(cache, tier_of(cache).prefetch(TokenKey(prompt)))
    assert f"{left} tokens to look for are below the threshold of 8, capped by" in str(prefetch)
    assert tier_of(cache).counts()["prefetch capped"] == 1
    cache.close()


def test_a_prefetch_that_shares_a_shorter_one_is_not_capped() -> None:
    shelf, longer = stocked(FULL, PROMPT), [*PROMPT, 1, 2, 3]
    cache = open_cache(FULL, shelf, settings(threshold_tokens=8), **LARGE)
    tier = tier_of(cache)
    shelf.gate.clear()
    tier.prefetch(TokenKey(PROMPT))
    until(lambda: shelf.n_calls, cache)
    prefetch = tier.prefetch(TokenKey(longer))
    shelf.gate.set()
    drained(cache, prefetch)
    assert prefetch.shared
    assert prefetch.gained_tokens == 32
    assert "capped" not in str(prefetch), prefetch
    cache.close()


@pytest.mark.parametrize("holder", ["prefetch", "store"])
def test_host_slots_promised_as_evictable_are_not_pinned(holder: str) -> None:
    """A prefix on HOST is room that can be made, until a fetch or a store holds it (A12)."""
    shelf = stocked(HISPARSE, PROMPT)
    given = settings(store="second-touch")
    cache = open_cache(HISPARSE, shelf, given, device_tokens=256, host_tokens=40)
    tier, server = tier_of(cache), Server(cache)
    server.serve(PROMPT[:17])
    cache.abort(cache.begin(TokenKey([*PROMPT[:16], 1])))  # used again: to be stored
    request = server.begin(range(500, 503), reserve=20)
    assert cache.admit(request).admitted
    host = host_of(server)
    assert 0 < host.headroom < host.evictable
    shelf.gate.clear()
    if holder == "prefetch":
        assert "promised to requests" in tier.prefetch(TokenKey(PROMPT)).reason
    else:
        cache.poll()
        assert tier.counts()["store dropped, promised to requests"] == 1
    assert host.headroom > 0
    shelf.gate.set()
    server.prefill(request)
    server.decode(request, 20)
    cache.finish(request)
    cache.close()


def test_the_threshold_counts_from_the_resumable_boundary() -> None:
    """Of ten stored pages eight are on DEVICE only: a fetch begins before them, and gains two."""
    shelf = stocked(FULL, PROMPT[:21])
    given = settings(threshold_tokens=6)
    cache = open_cache(FULL, shelf, given, policy=WritePolicy.WRITE_BACK, **LARGE)
    Server(cache).serve(PROMPT[:17])
    prefetch = drained(cache, tier_of(cache).prefetch(TokenKey(PROMPT)))
    assert (prefetch.anchor_tokens, prefetch.gained_tokens) == (16, 0)
    assert not shelf.asked
    cache.close()


@pytest.mark.parametrize(("n_lost", "tokens"), [(2, 28), (3, 0)])
def test_a_store_that_loses_promised_keys_is_asked_three_times(n_lost: int, tokens: int) -> None:
    """At each boundary it turns out that the state is gone."""
    setup = installed("full", "mamba")
    shelf = stocked(setup, PROMPT, chunk=2)
    cache = open_cache(setup, shelf, **LARGE)
    states = [page[0].key for page in addresses(cache, PROMPT, "mamba")]
    for key in states[len(states) - n_lost :]:
        spoil(shelf, key)
    prefetch = drained(cache, tier_of(cache).prefetch(TokenKey(PROMPT)))
    assert prefetch.gained_tokens == tokens
    assert len([key for key in shelf.asked if key in states]) == 3
    cache.close()


@pytest.mark.parametrize(("n_slots_left", "tokens"), [(1, 2), (2, 28)])
def test_pages_fetched_instead_stay_in_the_share(n_slots_left: int, tokens: int) -> None:
    """A state is gone; a shorter boundary takes another one, and two more pages of the window."""
    setup = installed("full", "swa", "mamba")
    shelf = stocked(setup, PROMPT, chunk=4)
    full, swa, mamba = slab_nbytes(setup)
    share = 16 * full + 3 * swa + mamba + n_slots_left * swa
    cache = open_cache(setup, shelf, settings(prefetch_nbytes=share), **LARGE)
    tier = tier_of(cache)
    ((gone,),) = addresses(cache, PROMPT, "mamba")[-1:]
    spoil(shelf, gone.key)
    held = [0]

    def seen(condition: Callable[[], object]) -> Callable[[], object]:
        def look() -> object:
            held.append(tier.prefetching.nbytes_in_flight)
            return condition()

        return look

    shelf.gate.clear()
    prefetch = tier.prefetch(TokenKey(PROMPT))
    until(seen(lambda: shelf.n_calls), cache)
    until(seen(lambda: held[-1]), cache)
    shelf.gate.set()
    until(seen(lambda: prefetch.ended), cache)
    assert 0 < max(held) <= share
    assert drained(cache, prefetch).gained_tokens == tokens
    cache.close()


def test_nodes_wait_while_enough_is_on_its_way_to_the_store() -> None:
    shelf = Shelf()
    (size,) = slab_nbytes(FULL)
    cache = open_cache(FULL, shelf, settings(store_nbytes=2 * size), **LARGE)
    storing, server = tier_of(cache).storing, Server(cache)
    shelf.gate.clear()
    for start in range(0, 500, 100):
        request = server.start(range(start, start + 3))
        server.prefill(request)
        cache.finish(request)
        assert cache.journal.drain(10)
        cache.poll()
    assert (storing.nbytes_in_flight, storing.n_in_flight) == (2 * size, 5)
    shelf.gate.set()
    assert cache.drain()
    assert len(shelf.stored) == 5
    cache.close()
