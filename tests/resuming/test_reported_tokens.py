"""`finish` reports as cached the tokens that the next request resumes from."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft import Cache, TokenKey

SMALL: dict[str, dict[str, Any]] = {
    "pages alone": {"full": {}},
    "windows": {"full": {}, "swa": {"window": 4}},
    "few states": {"full": {}, "mamba": {"states": 5}},
    "some states": {"full": {}, "swa": {"window": 4}, "mamba": {"states": 8}},
}
NO_TOKEN = 99_999
"""A token that no request has: with it behind, all of another's tokens may be resumed from."""


def reported(cache: Cache, random: Random, n_steps: int) -> list[tuple[int, int]]:
    """Pairs: tokens that a request's end reported, and tokens that its repetition resumes at."""
    found: list[tuple[int, int]] = []
    running: list[Any] = []
    for _ in range(n_steps):
        cache.poll()
        if len(running) < 3 and random.random() < 0.35:
            prompt = [100 * random.randrange(3) + n for n in range(random.randrange(2, 14))]
            key = TokenKey([*prompt, *random.sample(range(1000, 1009), random.randrange(2))])
            request = cache.begin(key, reserve=random.randrange(6), chunk=random.choice([2, 4, 99]))
            if cache.admit(request).admitted:
                cache.load_back(request)
                cache.drain()
                running.append(request)
            else:
                cache.abort(request)
            continue
        if not running:
            continue
        request, choice = random.choice(running), random.random()
        if choice < 0.6:
            n_tokens = cache.next_chunk(request) if request.computed < request.prompt else 1
            if request.computed >= request.prompt:
                request.key.extend([5000 + random.randrange(5)])
            if cache.allocate(request, n_tokens):
                cache.computed(request, n_tokens)
                continue
            running.remove(request)
            cache.abort(request)
        elif choice < 0.7:
            cache.checkpoint(request)
        elif choice < 0.75:
            cache.evict(random.choice([each.name for each in cache.tree.components]), 2)
        else:
            running.remove(request)
            tokens = request.key.tokens(0, request.computed).tolist()
            n_cached = cache.finish(request)
            following = cache.begin(TokenKey([*tokens, NO_TOKEN]))
            found.append((n_cached, following.anchor_tokens))
            cache.abort(following)
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize("write_policy", [None, "write-back", "write-through"])
@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32))
def test_finish_reports_the_tokens_that_the_next_request_resumes_from(
    name: str, write_policy: str | None, seed: int
) -> None:
    host = {} if write_policy is None else {"host_tokens": 40, "write_policy": write_policy}
    sizes: dict[str, Any] = {"page_size": 2, "device_tokens": 60, **host}
    with Cache.open(SMALL[name], **sizes) as cache:
        for n_cached, resumed in reported(cache, Random(seed), 120):
            assert n_cached == resumed
