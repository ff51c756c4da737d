"""The life of a request in an engine that computes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from kvgraft import Cache, Request, TokenKey


def admitted(cache: Cache, tokens: TokenKey | Iterable[int], **begin: Any) -> Request:
    """A request that was admitted at once; what it loads back has arrived."""
    key = tokens if isinstance(tokens, TokenKey) else TokenKey(tokens)
    request = cache.begin(key, **begin)
    decision = cache.admit(request)
    assert decision.admitted, decision
    cache.load_back(request)
    assert cache.drain()
    assert not request.load_failed
    return request


def prefill(
    cache: Cache,
    request: Request,
    until: int | None = None,
    each: Callable[[Request], object] = id,
) -> None:
    """Compute the prompt, or its first `until` tokens, in the chunks that the cache plans.

    Behind every chunk `each` is called.
    """
    end = request.prompt if until is None else until
    while request.computed < end:
        n_tokens = cache.next_chunk(request, None if until is None else end - request.computed)
        assert n_tokens
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
        each(request)


def prefilled(cache: Cache, tokens: TokenKey | Iterable[int], **begin: Any) -> Request:
    """A request that has computed its prompt."""
    request = admitted(cache, tokens, **begin)
    prefill(cache, request)
    return request


def decode(cache: Cache, request: Request, tokens: Iterable[int]) -> None:
    """Note tokens one by one, and compute each."""
    for token in tokens:
        request.key.extend([token])
        assert cache.allocate(request, 1)
        cache.computed(request, 1)


def serve(
    cache: Cache,
    tokens: TokenKey | Iterable[int],
    at_end: Mapping[str, Any] = MappingProxyType({}),
    **begin: Any,
) -> Request:
    """A whole life without output; `at_end` goes to `finish`."""
    request = prefilled(cache, tokens, **begin)
    cache.finish(request, **at_end)
    return request
