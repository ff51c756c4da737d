"""Calls that cannot be meant are refused in one line, and change nothing."""

from __future__ import annotations

import copy

import pytest

from kvgraft import Cache, ConfigError, LeaseError, TokenKey


@pytest.fixture
def cache() -> Cache:
    return Cache.open(["full"], page_size=4, device_tokens=64)


def test_a_closed_cache_begins_no_request(cache: Cache) -> None:
    cache.close()
    with pytest.raises(LeaseError, match="the cache is closed; open another"):
        cache.begin(TokenKey([1, 2]))


@pytest.mark.parametrize("call", ["table", "host_table", "private_slots", "state_slot"])
def test_a_component_that_is_not_there_is_named_beside_those_that_are(
    cache: Cache, call: str
) -> None:
    request = cache.begin(TokenKey([1, 2]))
    assert cache.admit(request).admitted
    with pytest.raises(ConfigError, match="component 'wide' is not in this cache; it has: full"):
        getattr(cache, call)(request, "wide")
    with pytest.raises(ConfigError, match="'wide'"):
        cache.evict("wide", 1)
    cache.abort(request)


def test_a_copied_key_grows_on_its_own() -> None:
    key = TokenKey([1, 2, 3], namespace="tenant")
    fork = copy.copy(key)
    fork.extend([4])
    key.extend([5, 6])
    assert (key.tokens().tolist(), fork.tokens().tolist()) == ([1, 2, 3, 5, 6], [1, 2, 3, 4])
    assert fork.namespace == "tenant"


def test_a_copied_key_is_found_where_the_first_was(cache: Cache) -> None:
    key = TokenKey(range(12))
    request = cache.begin(key)
    assert cache.admit(request).admitted
    cache.load_back(request)
    assert cache.allocate(request, 12)
    cache.computed(request, 12)
    cache.finish(request)
    fork = copy.copy(key)
    fork.truncate(8)
    fork.extend([99, 98, 97, 96, 95])
    assert cache.begin(fork).anchor_tokens == 8
    assert cache.begin(copy.copy(key)).anchor_tokens == 8
