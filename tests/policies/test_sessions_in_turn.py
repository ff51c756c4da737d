"""Sessions that come back in turn, more than a pool holds: what is learnt for pages keeps states.

By recency each is evicted just before it comes back.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvgraft import Cache, TokenKey

from ..serving import life

PAGE = 64
SESSIONS, TURNS, CHUNK = 24, 10, 1024
AMPLE = 1 << 20

CHATS = {"first": 8200, "new": 40, "output": 20}
"""A long document and short questions."""

AGENTS = {"first": 4100, "new": 500, "output": 60}
"""They grow: what they left before last is of no use."""


def hit_rate(
    components: dict[str, dict[str, Any]], device_tokens: int, first: int, new: int, output: int
) -> float:
    """The share of the prompts' tokens that were cached."""
    chance = random.Random(5)

    def tokens(n: int) -> list[int]:
        return [chance.randrange(50_000) for _ in range(n)]

    keys = [TokenKey(tokens(first)) for _ in range(SESSIONS)]
    prompts = cached = 0
    with Cache.open(
        components, device_tokens=device_tokens, page_size=PAGE, payload=False
    ) as cache:
        for turn in range(TURNS):
            for key in keys:
                key.extend(tokens(new if turn else 0))
                request = cache.begin(key, chunk=CHUNK if "swa" in components else None)
                assert cache.admit(request).admitted
                prompts += request.prompt
                cached += request.anchor_tokens
                life.prefill(cache, request)
                for _ in range(output):
                    assert cache.allocate(request, 1)
                    cache.computed(request, 1)
                key.extend(tokens(output))
                cache.finish(request)
        cache.check_integrity()
    return cached / prompts


def test_states_are_kept_as_pages_are() -> None:
    pages = SESSIONS * 8500 * 2 // 3 // PAGE * PAGE
    alone = hit_rate({"full": {}}, pages, **CHATS)
    assert alone > 0.5
    assert hit_rate({"full": {}, "mamba": {"states": 18}}, AMPLE, **CHATS) > 0.8 * alone
    both_short = {"full": {}, "mamba": {"states": 20}}
    assert hit_rate(both_short, pages, **CHATS) > 0.8 * alone


@pytest.mark.parametrize("n_windows", [18, 26])
def test_windows_are_kept_as_pages_are(n_windows: int) -> None:
    swa = {"window": 1024, "device_tokens": n_windows * 1024}
    assert hit_rate({"full": {}, "swa": swa}, AMPLE, **CHATS) > 0.4


@pytest.mark.parametrize(
    "short",
    [{"mamba": {"states": 18}}, {"swa": {"window": 1024, "device_tokens": 18 * 1024}}],
    ids=["states", "windows"],
)
def test_sessions_that_grow_are_kept_as_well(short: dict[str, Any]) -> None:
    """They come back later each time, at ages at which none did before."""
    assert hit_rate({"full": {}, **short}, AMPLE, **AGENTS) > 0.3


def test_hits_do_not_change_the_ages_that_were_learnt() -> None:
    pages = int(SESSIONS * (4100 + 4.5 * 560) * 2 / 3) // PAGE * PAGE
    assert hit_rate({"full": {}}, pages, **AGENTS) > 0.45


def test_the_state_that_a_session_left_before_last_goes_first() -> None:
    states = SESSIONS + 4  # a request at work takes a few
    assert hit_rate({"full": {}, "mamba": {"states": states}}, AMPLE, **AGENTS) > 0.75
