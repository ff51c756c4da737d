"""Shadows count what a pool would have been hit for; the boundary follows them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvgraft import Cache, TokenKey
from kvgraft_arena.shadows import Shadow
from kvgraft_arena.sums import PageSums

from .pools import PAGE, arena_of, opened, prefilled


def tokens_of(first: int, n_pages: int) -> bytes:
    return np.arange(first, first + n_pages * PAGE, dtype=np.int32).tobytes()


def test_a_prefix_has_one_sum_however_it_is_divided() -> None:
    sums, tokens = PageSums(PAGE), tokens_of(0, 6)
    whole = sums.after(5, tokens, 0, 0, 6).tolist()
    first = sums.after(5, tokens, 0, 0, 2).tolist()
    rest = sums.after(first[-1], tokens[2 * PAGE * 4 :], 0, 2, 4).tolist()
    assert first + rest == whole
    assert sums.after(first[-1], tokens, 2, 2, 4).tolist() == rest
    assert len({*whole, *sums.after(6, tokens, 0, 0, 6).tolist()}) == 12
    swapped = tokens[PAGE * 4 : 2 * PAGE * 4] + tokens[: PAGE * 4] + tokens[2 * PAGE * 4 :]
    assert sums.after(5, swapped, 0, 0, 6).tolist()[1] != whole[1]
    assert sums.of_root(0) != sums.of_root(1)


def finished(cache: Cache, first: int, n_pages: int) -> None:
    cache.finish(prefilled(cache, first, n_pages * PAGE))
    cache.poll()


def shadows_of(cache: Cache) -> list[Shadow]:
    assert cache.arenas is not None
    return list(cache.arenas.balances[0].shadows)


def test_a_state_that_its_pool_was_short_of_is_a_hit_of_its_shadow() -> None:
    """Seven conversations of two states each, and room for eight states."""
    cache = opened(device_tokens=480 * PAGE)
    while cache.move_memory("mamba", "full"):
        pass
    states = arena_of(cache).by_name["mamba"]
    assert states.allocator.end == 8
    for first in range(0, 7000, 1000):
        finished(cache, first, 10)
    full, mamba = shadows_of(cache)
    assert (full.hits, mamba.hits) == (0, 0)
    request = cache.begin(TokenKey(range(10 * PAGE + 1)))
    assert request.anchor_tokens == 0
    assert cache.admit(request).admitted
    assert (full.hits, mamba.hits) == (0, 10 * PAGE)
    cache.abort(request)
    cache.close()


def test_pages_that_their_pool_was_short_of_are_a_hit_of_its_shadow() -> None:
    cache = opened(device_tokens=480 * PAGE)
    while cache.move_memory("full", "mamba"):
        pass
    while arena_of(cache).by_name["full"].leased < 6:
        assert cache.move_memory("mamba", "full")
    for first in range(0, 6000, 1000):
        finished(cache, first, 10)
    request = cache.begin(TokenKey(range(10 * PAGE + 1)))
    assert request.anchor_tokens == 0
    assert cache.admit(request).admitted
    full, mamba = shadows_of(cache)
    assert (full.hits, mamba.hits) == (10 * PAGE, 0)
    cache.abort(request)
    cache.close()


def test_a_shadow_forgets_the_oldest_and_what_is_back() -> None:
    cache = opened(device_tokens=480 * PAGE)
    while cache.move_memory("mamba", "full"):
        pass
    for first in range(0, 60_000, 1000):
        finished(cache, first, 2)
    mamba = shadows_of(cache)[1]
    n_ghosts = len(mamba._ghosts)
    assert n_ghosts == mamba.limit_nbytes // mamba.slot_nbytes == 42
    finished(cache, 20_000, 2)
    assert len(mamba._ghosts) == n_ghosts, "one is back, and one has left for it"
    before = mamba.hits
    request = cache.begin(TokenKey(range(20_000, 20_000 + 2 * PAGE + 1)))
    assert request.anchor_tokens == 2 * PAGE
    assert cache.admit(request).admitted
    assert mamba.hits == before
    cache.abort(request)
    cache.close()


def conversations(cache: Cache, n_requests: int, n_users: int) -> list[int]:
    """Users come back in a random order, each with a few more pages; pages leased at times."""
    random = Random(1)
    lengths = dict.fromkeys(range(n_users), 3)
    history = []
    for _ in range(n_requests):
        user = random.randrange(n_users)
        lengths[user] = lengths[user] + 1 if lengths[user] < 12 else 3
        finished(cache, user * 1000, lengths[user])
        history.append(arena_of(cache).by_name["full"].leased)
    return history


@pytest.mark.parametrize("start", ["full", "mamba"])
def test_the_boundary_finds_its_place_from_either_end(start: str) -> None:
    """40 users with 8 pages and a state each, most of the time, of pools of 512 slots in all."""
    cache = opened(device_tokens=480 * PAGE, guard="sampled", payload=False)
    other = "mamba" if start == "full" else "full"
    while cache.move_memory(other, start):
        pass
    assert arena_of(cache).by_name[other].leased == 1
    history = conversations(cache, 1500, 70)
    assert 30 < history[-1] < 62
    assert arena_of(cache).moves > 20
    cache.close()


def test_equal_calls_move_equal_boundaries() -> None:
    """Nothing is drawn and no clock is read (K3)."""
    histories = []
    for _ in range(2):
        cache = opened(device_tokens=100 * PAGE, guard="off", payload=False)
        histories.append(conversations(cache, 300, 70))
        cache.close()
    assert histories[0] == histories[1]
    assert len(set(histories[0])) > 2
