"""Rejections: only of what can never run, and the pools named are those that are too small."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import Cache, Outcome, Request, TokenKey

from ..serving import life


def opened(states: int, **settings: Any) -> Cache:
    given = {"page_size": 4, "device_tokens": 256, "guard": "on", "payload": False, **settings}
    return Cache.open({"full": {}, "mamba": {"states": states}}, **given)


def played(cache: Cache, request: Request, n_decoded: int) -> None:
    life.prefill(cache, request)
    for token in range(n_decoded):
        assert cache.step([request], [token]).requests == [request]
    cache.step([request], n_tokens=0)


def test_a_rejection_names_the_pool_that_is_too_small() -> None:
    """The states of its resume points would be left out: they are not what is short."""
    with opened(3) as cache:
        request = cache.begin(TokenKey(range(400)), reserve=8, resume_at=(40, 80, 120))
        assert len(request.checkpoints) >= 3
        decision = cache.admit(request)
        assert decision.outcome is Outcome.NEVER_FITS
        assert [each.component for each in decision.shortages] == ["full"]
        assert decision.shortages[0].capacity < decision.shortages[0].needed
        assert decision.shortages[0].needed <= (400 + 8) // 4 + 2
        assert request.checkpoints


@pytest.mark.parametrize("interval", [0, 8])
@pytest.mark.parametrize("n_decoded", [1, 20])
def test_one_state_is_enough_to_decode(interval: int, n_decoded: int) -> None:
    """The state that follows a decode is a point, too: nobody is rejected because of it."""
    with opened(1, decode_interval_tokens=interval) as cache:
        request = cache.begin(TokenKey(range(30)), reserve=24)
        assert cache.admit(request).admitted
        played(cache, request, n_decoded)
        cache.check_integrity()
        cached = cache.finish(request)
        assert cached == (30 + n_decoded if (30 + n_decoded) % 4 == 0 else 0)
        again = cache.begin(TokenKey(range(30)), reserve=24)
        assert cache.admit(again).admitted


def test_a_state_that_only_waits_for_room_is_not_left_out() -> None:
    with opened(2) as cache:
        first = cache.begin(TokenKey(range(8)))
        assert cache.admit(first).admitted
        second = cache.begin(TokenKey(range(100, 108)), reserve=4)
        assert cache.admit(second).outcome is Outcome.DEFERRED
        assert second.keeps_decoded
        cache.abort(first)
        assert cache.admit(second).admitted
        assert second.keeps_decoded


def test_a_chunk_behind_the_prompt_has_no_tokens() -> None:
    with opened(4) as cache:
        request = cache.begin(TokenKey(range(9)), reserve=24)
        assert cache.admit(request).admitted
        played(cache, request, 13)
        assert [cache.next_chunk(request, limit) for limit in (None, 0, 5)] == [0, 0, 0]
