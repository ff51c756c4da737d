"""A HOST full of evictable data is as good as an empty one, for any prefix on it (S3)."""

from __future__ import annotations

import random

import pytest

from kvgraft import TokenKey
from kvgraft.cache import Cache

from ..serving.setups import SETUPS, Setup
from .serving_process import prompt
from .shelf import drained, open_cache, stocked, tier_of


def prefetched(cache: Cache, tokens: list[int]) -> int:
    """Tokens that a request could resume from after a prefetch; it does not run."""
    prefetch = drained(cache, tier_of(cache).prefetch(TokenKey(tokens)))
    cache.abort(cache.begin(prefetch.key, prefetch=prefetch))
    return prefetch.tokens


@pytest.mark.one_in(9)
@pytest.mark.parametrize("n_prefetches", [6, pytest.param(30, marks=pytest.mark.long)])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_prefixes_that_share_pages_come_whole_one_after_the_other(
    setup: Setup, n_prefetches: int
) -> None:
    chance = random.Random(1)
    prompts = [prompt(chance) for _ in range(n_prefetches)]
    shelf = stocked(setup, *prompts, chunk=4)
    alone = {}
    for tokens in map(tuple, prompts):
        if tokens not in alone:
            cache = open_cache(setup, shelf, device_tokens=256, host_tokens=512)
            alone[tokens] = prefetched(cache, list(tokens))
            cache.close()
    assert any(alone.values())
    small = open_cache(setup, shelf, device_tokens=256, host_tokens=64)
    assert [prefetched(small, tokens) for tokens in prompts] == [
        alone[tuple(tokens)] for tokens in prompts
    ]
    small.close()
