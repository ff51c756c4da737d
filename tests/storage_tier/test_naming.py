"""Pages get their hash once, whether they are looked for in STORAGE, computed or stored."""

from __future__ import annotations

from collections import Counter
from copy import copy
from typing import Any

import pytest

from kvgraft import GuardMode, TokenKey
from kvgraft.cache import Cache
from kvgraft_storage.tier import Prefetch
from kvgraft_storage.tier.names import PageHashes, known_hashes

from ..serving.server import Server
from ..serving.setups import SETUPS, Setup
from .shelf import Shelf, open_cache, settings, tier_of, until

PROMPT = list(range(100, 164))
ROOM: dict[str, Any] = {"device_tokens": 256, "host_tokens": 512, "guard": GuardMode.OFF}


def ended(prefetch: Prefetch, cache: Cache) -> Prefetch:
    until(lambda: prefetch.ended, cache)
    return prefetch


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_pages_looked_for_computed_and_stored_are_hashed_once(
    setup: Setup, hashed: Counter[tuple[bytes, bytes]]
) -> None:
    shelf = Shelf()
    server = Server(open_cache(setup, shelf, **ROOM))
    cache, key = server.cache, TokenKey(PROMPT)
    for _ in range(2):
        prefetch = ended(tier_of(cache).prefetch(key), cache)
    looked_for = len(hashed)
    assert looked_for
    request = cache.begin(key, prefetch=prefetch)
    assert cache.admit(request).admitted
    server.prefill(request)
    cache.checkpoint(request)
    server.decode(request, 9)
    cache.finish(request)
    assert cache.drain()
    assert len(hashed) > looked_for, "decoded tokens went to the store as well"
    assert shelf.stored
    assert set(hashed.values()) == {1}
    cache.check_integrity()
    cache.close()


def test_hashes_are_of_one_tree_one_namespace_and_the_pages_that_are_there() -> None:
    mine = object()
    key = TokenKey(PROMPT, "tenant")
    three, four, five = bytes([3]) * 32, bytes([4]) * 32, bytes([5]) * 32
    versions = tier_of(SETUPS["full"].open(storage=settings())).versions
    key.hashed = PageHashes(mine, "tenant", 3, three + four + five, versions, versions.number)
    assert known_hashes(key, mine, 3, 6) == three + four + five
    assert known_hashes(key, mine, 4, 5) == four
    assert known_hashes(key, mine, 2, 5) == b""
    assert known_hashes(key, mine, 4, 7) == four + five, "as far as they are known"
    assert known_hashes(key, mine, 7, 9) == b""
    assert known_hashes(key, object(), 3, 6) == b""
    versions.change(["any"], None)
    assert known_hashes(key, mine, 3, 6) == b"", "a namespace was cleared"
    key.hashed = key.hashed._replace(number=versions.number)
    assert known_hashes(key, mine, 3, 6) == three + four + five
    key.namespace = "another"
    assert known_hashes(key, mine, 3, 6) == b""


def test_a_copy_that_is_given_another_namespace_has_other_names() -> None:
    setup, shelf = SETUPS["full"], Shelf()
    server = Server(open_cache(setup, shelf, **ROOM))
    cache, key = server.cache, TokenKey(PROMPT)
    prefetch = tier_of(cache).prefetch(key)
    until(lambda: prefetch.ended, cache)
    fork = copy(key)
    fork.namespace = "tenant"
    for each in (fork, key):
        request = cache.begin(each)
        assert cache.admit(request).admitted
        server.prefill(request)
        cache.finish(request)
    assert cache.drain()
    cache.check_integrity()
    cache.close()
    again = open_cache(setup, shelf.copy(), **ROOM)
    for namespace in (None, "tenant"):
        found = ended(tier_of(again).prefetch(TokenKey(PROMPT, namespace)), again)
        assert found.tokens > 0
    again.close()


def test_a_key_that_is_cut_drops_them_and_a_copy_has_them() -> None:
    key = TokenKey(PROMPT)
    versions = tier_of(SETUPS["full"].open(storage=settings())).versions
    key.hashed = PageHashes(None, None, 0, bytes(32), versions, 0)
    fork = copy(key)
    assert fork.hashed is key.hashed
    key.truncate(40)
    assert [each.hashed is None for each in (key, fork)] == [True, False]
