"""Servers hear of uses: values that were touched outlive others where a server evicts by use."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from kvgraft_storage import Address, Status
from kvgraft_testing.storage.traffic import (
    addresses,
    fetched,
    opened,
    settled,
    stored,
    supervised,
)
from kvgraft_valkey.records import Names

from . import shared
from .servers import Cluster, Refused, Server, needs_server

pytestmark = needs_server

OK, MISS = Status.OK, Status.MISS
SIZE = 200_000
AGE_S = 5000
PREFIX = "uses:"


def strings(place: Address) -> Names:
    return Names.of(PREFIX.encode(), place.key)


def let_age(servers: Server | Cluster, places: Sequence[Address]) -> None:
    """As if nobody had used these values for a long time."""
    for place in places:
        for name in strings(place):
            content: Any = servers.ask("DUMP", name)
            servers.ask("RESTORE", name, 0, content, "REPLACE", "IDLETIME", AGE_S)


def ages(servers: Server | Cluster, place: Address) -> list[Any]:
    """Seconds since the last use of each string; asking is none."""
    return [asked(servers, "OBJECT", "IDLETIME", name) for name in strings(place)]


def asked(servers: Server | Cluster, *words: bytes | str) -> object:
    for server in servers.primaries if isinstance(servers, Cluster) else [servers]:
        with suppress(Refused):  # another one has it
            return server.ask(*words)
    raise AssertionError("nobody has the key's slot")


@pytest.mark.parametrize("base", ["single", "cluster"])
def test_a_touch_is_a_use_of_header_and_payload_and_of_nothing_else(base: str) -> None:
    servers: Server | Cluster = shared.single() if base == "single" else shared.cluster()
    url = servers.url + ("?" if base == "single" else "&") + f"prefix={PREFIX}"
    places = addresses(4)
    with supervised(url) as storage, opened(url) as store:
        assert stored(storage, places[:3], 100) == [OK] * 3
        let_age(servers, places[:3])
        store.touch([places[number].key for number in (3, 2, 0)])
        first, left, last = (ages(servers, place) for place in places[:3])
        assert max(first + last) < AGE_S <= min(left)
        assert list(store.exists([places[3].key])) == [False]


def test_values_that_were_touched_outlive_others() -> None:
    server = shared.evicting()
    server.ask("FLUSHALL")  # room for all but fewer of these than are old
    old, new = addresses(30), addresses(48, 30)
    with supervised(f"{server.url}?prefix={PREFIX}") as storage:
        assert stored(storage, old, SIZE) == [OK] * 30
        let_age(server, old)
        assert settled(storage.touch(old[:5])) == [OK] * 5
        assert stored(storage, new, SIZE) == [OK] * 48
        told = fetched(storage, old, SIZE)
        assert told[:5] == [OK] * 5
        assert MISS in told[5:]


@pytest.mark.parametrize(
    ("policy", "more", "claim"),
    [
        ("allkeys-lru", "", "told"),
        ("allkeys-lfu", "", "told"),
        ("allkeys-random", "", "not told"),
        ("volatile-lru", "&ttl_s=100", "told"),
        ("volatile-ttl", "&ttl_s=100", "not told"),
        ("volatile-lru", "", "not told"),
        ("noeviction", "", "not told"),
    ],
)
def test_touch_is_claimed_where_a_use_counts(policy: str, more: str, claim: str) -> None:
    server = shared.evicting()
    server.ask("CONFIG", "SET", "maxmemory-policy", policy)
    try:
        with opened(f"{server.url}?prefix={PREFIX}{more}") as store:
            assert store.capabilities.touch is (claim == "told")
            assert not store.capabilities.lru
    finally:
        server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
