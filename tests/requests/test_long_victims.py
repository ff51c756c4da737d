"""Of a long sequence only as much is evicted as somebody needs: its end (E2)."""

from __future__ import annotations

import pytest

from kvgraft import Cache, TokenKey

from ..serving import life


def serve(cache: Cache, prompt: range) -> int:
    anchor = life.serve(cache, prompt).anchor_tokens
    cache.check_integrity()
    return anchor


@pytest.mark.parametrize("page_size", [16, 64, 2048])
def test_a_long_sequence_keeps_its_beginning(page_size: int) -> None:
    with Cache.open(
        ["full"], page_size=page_size, device_tokens=20 * 2048, policy="lru", payload=False
    ) as cache:
        long, other = range(16 * 2048), range(100_000, 100_000 + 8 * 2048)
        serve(cache, long)
        serve(cache, other)
        (full,) = cache.tree.components
        assert full.device.free == 0  # none that nobody asked for
        found = cache.begin(TokenKey(long))
        assert found.anchor_tokens == 20 * 2048 - len(other)
        cache.abort(found)
