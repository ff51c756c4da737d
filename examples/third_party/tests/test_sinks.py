"""This component's own behaviour: a prompt's middle is given back, its two ends suffice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvgraft import Cache, Request, TokenKey

PAGE = 4
POOL_PAGES = 16
PROMPT = 400


@pytest.fixture
def cache() -> Iterator[Cache]:
    opened = Cache.open(
        {"sinks": {"sinks": 6, "window": 10}}, page_size=PAGE, device_tokens=POOL_PAGES * PAGE
    )
    yield opened
    opened.close()


def prefill(cache: Cache) -> Request:
    """A prompt computed in chunks of 16 tokens."""
    request = cache.begin(TokenKey(range(PROMPT)), chunk=16)
    assert cache.admit(request).admitted
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        assert n_tokens
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
        cache.checkpoint(request)
    return request


def test_a_prompt_longer_than_the_pool_keeps_its_first_pages_and_its_last(cache: Cache) -> None:
    request = prefill(cache)
    table = cache.table(request, "sinks")
    assert len(table) == PROMPT // PAGE > POOL_PAGES
    assert all(table[:2] >= 0)
    assert all(table[-3:] >= 0)
    assert (table >= 0).sum() < POOL_PAGES
    cache.check_integrity()


def test_the_next_request_resumes_where_the_middle_is_gone(cache: Cache) -> None:
    cache.finish(prefill(cache))
    again = cache.begin(TokenKey([*range(PROMPT), 7]))
    assert again.anchor_tokens == PROMPT
    cache.abort(again)
    cache.check_integrity()
