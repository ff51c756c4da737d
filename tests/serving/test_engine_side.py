"""Conveniences an engine meets every day: closing, printing, editing keys, being told to wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvgraft import Cache, CacheConfig, ConfigError, LeaseError, TokenKey, WritePolicy
from kvgraft_testing.stepped import SteppedTransferEngine

SETTINGS: dict[str, Any] = {"page_size": 16, "device_tokens": 64 * 16, "load": None}


def run(cache: Cache, key: TokenKey) -> None:
    request = cache.begin(key)
    assert cache.admit(request).admitted
    assert cache.allocate(request, request.prompt - request.computed)
    cache.computed(request, request.prompt - request.computed)
    cache.finish(request)


def test_a_with_statement_closes_the_cache_even_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), Cache.open(["full"], **SETTINGS) as cache:
        raise ZeroDivisionError
    assert cache.closed
    with pytest.raises(LeaseError, match="the cache is closed"):
        cache.begin(TokenKey(range(10)))


def test_caches_requests_and_keys_print_their_state_and_no_tokens() -> None:
    with Cache.open(["full", "swa"], host_tokens=512, **SETTINGS) as cache:
        key = TokenKey(range(7000, 7100), namespace="tenant-1")
        request = cache.begin(key, reserve=20)
        assert repr(key) == "<TokenKey of 100 tokens in namespace 'tenant-1'>"
        assert repr(request) == (
            "<Request leased: 0 of 100 prompt tokens computed or reused, resumed at 0, "
            "up to 120 tokens>"
        )
        assert repr(cache) == (
            "<Cache full+swa: page size 16, 1024 tokens on cpu, 512 on host, 1 request>"
        )
        cache.abort(request)
    assert repr(cache).endswith("0 requests, closed>")
    assert "aborted" not in repr(request)
    assert repr(request).startswith("<Request closed: ")


def test_a_key_is_cut_to_its_first_tokens() -> None:
    key = TokenKey(range(10))
    with pytest.raises(ConfigError, match="truncate: n_tokens -1; give a whole number, 0 or"):
        key.truncate(-1)
    key.truncate(1000)
    assert key.n_tokens == 10
    key.truncate(np.int64(9))
    assert key.n_tokens == 9
    key.truncate(4)
    assert key.tokens().tolist() == [0, 1, 2, 3]


def test_a_request_that_waits_for_backups_alone_is_told_so() -> None:
    """An engine with nothing running could not tell it from being stuck otherwise."""
    engine = SteppedTransferEngine()
    copied: dict[str, Any] = {"host_tokens": 64 * 16, "write_policy": WritePolicy.WRITE_THROUGH}
    config = CacheConfig(components={"full": {}}, **copied, **SETTINGS)
    with Cache(config, transfers=engine) as cache:
        run(cache, TokenKey(range(60 * 16)))
        assert engine.pending
        request = cache.begin(TokenKey(range(5000, 5000 + 30 * 16)))
        decision = cache.admit(request)
        assert decision.waits_for is not None
        assert decision.waits_for.running == decision.waits_for.leased == 0
        assert decision.waits_for.transfers == cache.journal.n_in_flight > 0
        assert f"waits for transfers in flight: {cache.journal.n_in_flight}" in str(decision)
        while engine.pending:
            engine.step()
        cache.poll()
        assert cache.admit(request).admitted


def test_a_deferred_request_is_told_which_others_it_waits_for() -> None:
    with Cache.open(["full"], **SETTINGS) as cache:
        running, leased = (cache.begin(TokenKey([at] * 500)) for at in (1, 2))
        assert cache.admit(running).admitted
        late = cache.begin(TokenKey([3] * 900))
        decision = cache.admit(late)
        assert str(decision).endswith("waits for running: 1, begun and not admitted: 1")
        cache.abort(running)
        cache.abort(leased)
        assert cache.admit(late).waits_for is None


def test_explaining_something_that_is_no_key_is_refused_in_a_line() -> None:
    with (
        Cache.open(["full"], **SETTINGS) as cache,
        pytest.raises(ConfigError, match="a range is no TokenKey"),
    ):
        cache.explain(range(10))  # type: ignore[arg-type]


def test_a_request_whose_prompt_was_cut_is_not_restarted() -> None:
    with Cache.open(["full"], **SETTINGS) as cache:
        key = TokenKey(range(500))
        request = cache.begin(key)
        key.truncate(100)
        with pytest.raises(LeaseError, match="key was cut to 100 tokens, below the request's prom"):
            cache.restart(request)
        cache.abort(request)
        cache.check_integrity()
