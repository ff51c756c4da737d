"""A chunk larger than the admitted one takes slots of the reservation early (A5, A11)."""

from __future__ import annotations

from kvgraft import Cache, Reach, TokenKey, Trailing
from kvgraft.config import CacheConfig
from kvgraft_testing.machine import paged_plugin

PROMPT = 16
LARGER = 8
"""Tokens of a step that finds more room than was asked for."""


def test_slots_taken_early_are_not_promised_again() -> None:
    """Promises never exceed a slot for each page ahead and one in reserve."""
    config = CacheConfig(components={"window": {}}, page_size=1, device_tokens=32)
    cache = Cache(config, plugins=[paged_plugin("window", Reach(Trailing(4)), mirrored=False)])
    request = cache.begin(TokenKey(range(PROMPT)), chunk=2)
    assert cache.admit(request).admitted
    cache.load_back(request)
    ledger = cache.tree.component("window").device
    while request.computed < PROMPT:
        n_tokens = cache.next_chunk(request, LARGER)
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
        assert ledger.promised <= PROMPT - request.allocated + 1
    cache.abort(request)
    cache.close()


def test_a_larger_chunk_takes_nothing_that_others_were_promised() -> None:
    config = CacheConfig(components={"window": {}}, page_size=1, device_tokens=32)
    with Cache(
        config, plugins=[paged_plugin("window", Reach(Trailing(4)), mirrored=False)]
    ) as cache:
        first = cache.begin(TokenKey(range(28)), chunk=2)
        assert cache.admit(first).admitted
        other = cache.begin(TokenKey(range(100, 119)))
        assert cache.admit(other).admitted
        ledger = cache.tree.component("window").device
        assert ledger.headroom < 28 <= ledger.free
        allowed = first.components[0].account.promised + ledger.headroom
        assert cache.next_chunk(first, 28) == allowed
        for request in (first, other):
            while request.computed < request.prompt:
                n_tokens = cache.next_chunk(request, 28)
                assert n_tokens
                assert cache.allocate(request, n_tokens)
                cache.computed(request, n_tokens)
                cache.check_integrity()
