"""Servers that die, hang, fill up or forget: misses in time, and recovery without help."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvgraft_storage import (
    TRANSIENT,
    BreakerState,
    Status,
    Storage,
    StorageBackend,
    SupervisionLimits,
    Value,
)
from kvgraft_testing.storage.traffic import (
    addresses,
    fetched,
    opened,
    room,
    stored,
    supervised,
    until,
)
from kvgraft_valkey.records import Names

from . import shared
from .servers import Server, needs_server

pytestmark = needs_server

OK, MISS, FULL = Status.OK, Status.MISS, Status.FULL
SIZE = 9000
DEADLINE_S = 0.4
SLACK_S = 30.0
"""Seconds that a busy machine may add to a deadline; far below those of a waiting call."""
QUICK = SupervisionLimits(
    deadline_s=DEADLINE_S, failure_limit=2, cooldown_s=0.05, cooldown_limit_s=0.2
)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def url(server: Server, more: str = "") -> str:
    return f"{server.url}?prefix=faults:&timeout_s={DEADLINE_S}{more}"


def recovers(storage: Storage) -> None:
    """Wait until the store takes and gives again, with nothing done but using it."""

    def works() -> bool:
        storage.poll()
        # reads and writes have a breaker each
        wrote = stored(storage, addresses(2), SIZE) == [OK] * 2
        return wrote and fetched(storage, addresses(2), SIZE) == [OK] * 2

    until(works)
    assert storage.state is BreakerState.CLOSED


def fails(storage: Storage) -> None:
    """Use a store that is gone until the breaker opens: every call ends in time, as a miss."""

    def opened_up() -> bool:
        for call in (fetched, stored):
            begin = time.monotonic()
            told = call(storage, addresses(3), SIZE)
            assert time.monotonic() - begin < DEADLINE_S + SLACK_S
            assert set(told) <= TRANSIENT
        return storage.state is not BreakerState.CLOSED

    until(opened_up)


def test_a_server_that_is_killed_and_comes_back(server: Server) -> None:
    with supervised(url(server), QUICK) as storage:
        for _ in range(2):
            recovers(storage)
            server.kill()
            fails(storage)
            server.start()
        recovers(storage)


def test_a_server_that_is_killed_in_the_middle_of_traffic(server: Server) -> None:
    stop, seen = threading.Event(), set[Status | None]()
    places = addresses(6)

    def traffic() -> None:
        while not stop.is_set():
            seen.update(stored(storage, places, 200_000))
            seen.update(fetched(storage, places, 200_000))

    with supervised(url(server), QUICK) as storage:
        worker = threading.Thread(target=traffic)
        worker.start()
        try:
            for _ in range(3):
                until(lambda: OK in seen)
                server.kill()
                until(lambda: TRANSIENT & seen)
                server.start()
                seen.clear()
            until(lambda: OK in seen)
        finally:
            stop.set()
            worker.join()
        assert seen <= {OK, MISS, *TRANSIENT}
        recovers(storage)


def test_a_server_that_hangs_blocks_nobody_beyond_the_deadline(server: Server) -> None:
    with supervised(url(server), QUICK) as storage:
        recovers(storage)
        server.stop()
        fails(storage)
        assert storage.n_abandoned == 0, "the calls came back by themselves"
        assert fetched(storage, addresses(1), SIZE)[0] in TRANSIENT
        server.resume()
        recovers(storage)


@pytest.mark.parametrize("timeout_s", ["0.05", "30"])
def test_a_read_of_one_value_ends_in_time_however_long_the_client_waits(
    server: Server, timeout_s: str
) -> None:
    with opened(f"{server.url}?timeout_s={timeout_s}") as store:
        key = [bytes(32)]
        assert list(store.set_from(key, [room(300_000)], 5.0)) == [OK]
        server.stop()
        begin = time.monotonic()
        assert list(store.get_into(key, [room(300_000)], 0.3)) == [Status.TIMEOUT]
        assert time.monotonic() - begin < 0.3 + SLACK_S
        server.resume()


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get_into([bytes(32)] * 3, [room(SIZE)] * 3, DEADLINE_S),
        lambda store: store.set_from([bytes(32)] * 3, [room(SIZE)] * 3, DEADLINE_S),
        lambda store: store.set_from([bytes(32)] * 3, [room(1 << 21)] * 3, DEADLINE_S),
        lambda store: store.remove([bytes(32)] * 3),
    ],
)
def test_a_call_to_a_server_that_hangs_is_over_by_its_deadline(
    server: Server, call: Callable[[StorageBackend], list[Status]]
) -> None:
    with opened(url(server)) as store:
        server.stop()
        begin = time.monotonic()
        assert call(store) == [Status.TIMEOUT] * 3
        assert 0.5 * DEADLINE_S < time.monotonic() - begin < DEADLINE_S + SLACK_S
        server.resume()


def test_calls_without_a_deadline_end_too(server: Server) -> None:
    with opened(url(server)) as store:
        server.stop()
        for call in (lambda: store.exists([bytes(32)]), store.stats, store.verify, store.clear):
            begin = time.monotonic()
            with pytest.raises(OSError, match="did not answer in time"):
                call()
            assert time.monotonic() - begin < DEADLINE_S + SLACK_S
        assert store.healthy() is False
        server.resume()
        until(store.healthy)


def test_a_servers_answer_after_the_deadline_reaches_no_buffer(server: Server) -> None:
    size = 300_000
    with opened(url(server)) as store:
        assert list(store.set_from([bytes(32)], [room(size)], 5.0)) == [OK]
        mine = [Value(memoryview(bytearray(b"\xa5" * 256)), memoryview(bytearray(b"\xa5" * size)))]
        server.stop()
        assert list(store.get_into([bytes(32)], mine, 0.1)) == [Status.TIMEOUT]
        server.resume()
        until(store.healthy)  # behind the late answer, on the same connection
        assert bytes(mine[0].header) + bytes(mine[0].payload) == b"\xa5" * (256 + size)


def test_a_store_can_be_closed_while_a_call_hangs(server: Server) -> None:
    with opened(url(server)) as store:
        server.stop()
        told: list[list[Status]] = []
        inside = threading.Thread(
            target=lambda: told.append(list(store.get_into([bytes(32)], [room(SIZE)], 3.0)))
        )
        inside.start()
        until(lambda: store._connection._n_running)  # type: ignore[attr-defined]
        store.close()
        assert inside.is_alive()
        assert not told
        inside.join()
        assert told == [[Status.TIMEOUT]]
        server.resume()


def test_a_full_server_says_full_and_serves_its_values() -> None:
    places = addresses(60)
    with supervised(url(shared.full()), QUICK) as storage:
        told = [stored(storage, [place], 250_000)[0] for place in places]
        assert told[0] is OK
        assert told[-1] is FULL
        assert set(told) == {OK, FULL}
        assert storage.state is BreakerState.CLOSED, "a full server is no failure"
        kept = [place for place, status in zip(places, told) if status is OK]
        assert fetched(storage, kept, 250_000) == [OK] * len(kept)
        storage.remove(kept[:8]).wait(20)
        assert stored(storage, kept[:2], 250_000) == [OK] * 2


def test_a_server_that_evicts_takes_everything_and_says_so() -> None:
    places = addresses(100)
    with supervised(url(shared.evicting())) as storage:
        told = [stored(storage, [place], 250_000)[0] for place in places]
        assert set(told) == {OK}
        back = fetched(storage, places, 250_000)
        assert set(back) == {OK, MISS}
        ticket = storage.ask("stats", lambda store: store.stats())
        assert ticket.wait(20)
        assert ticket.value.details["servers_evicted_keys"] > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "more", "claim"),
    [
        ("noeviction", "", "stays"),
        ("allkeys-lru", "", "evicts"),
        ("allkeys-random", "", "evicts"),
        ("volatile-lru", "", "stays"),
        ("volatile-lru", "&ttl_s=100", "evicts"),
    ],
)
def test_eviction_is_claimed_only_where_it_happens(
    server: Server, policy: str, more: str, claim: str
) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", policy)
    with opened(url(server, more)) as store:
        assert not store.capabilities.evicts, "no limit, no eviction"
        assert store.stats().capacity_nbytes is None
    server.ask("CONFIG", "SET", "maxmemory", "20mb")
    with opened(url(server, more)) as store:
        assert store.capabilities.evicts is (claim == "evicts")
        assert store.stats().capacity_nbytes == 20 << 20


def test_durable_is_claimed_only_by_a_server_that_syncs_before_it_answers() -> None:
    settings = {"appendonly": "yes", "appendfsync": "always"}
    server = Server(**settings)
    try:
        with supervised(url(server), QUICK) as storage:
            assert stored(storage, addresses(5), SIZE) == [OK] * 5
            assert storage.flush().wait(20)
            server.kill()
            server.start()
            until(lambda: fetched(storage, addresses(5), SIZE) == [OK] * 5)
        with opened(url(server)) as store:
            assert store.capabilities.durable
        for name, setting in (("appendfsync", "everysec"), ("no-appendfsync-on-rewrite", "yes")):
            server.ask("CONFIG", "SET", name, setting)
            with opened(url(server)) as store:
                assert not store.capabilities.durable
            server.ask("CONFIG", "SET", "appendfsync", "always")
    finally:
        server.close()


def test_a_payload_longer_than_a_server_takes_is_too_large() -> None:
    with opened(url(shared.single())) as store:
        longest = store.capabilities.max_payload_nbytes
        assert longest == 2 << 20
        keys = [bytes([number]) * 32 for number in range(3)]
        values = [room(longest), room(longest + 1), room(10)]
        assert list(store.set_from(keys, values, 10.0)) == [OK, Status.TOO_LARGE, OK]
        assert list(store.exists(keys)) == [True, False, True]


def test_a_server_that_refuses_to_write_is_down_with_its_reason(server: Server) -> None:
    server.ask("ACL", "SETUSER", "default", "-mset")
    with supervised(url(server), QUICK) as storage:
        assert stored(storage, addresses(2), SIZE) == [Status.DOWN] * 2
        assert "no permissions to run the 'mset' command" in str(storage.last_error).lower()
        assert fetched(storage, addresses(2), SIZE) == [MISS] * 2


@pytest.mark.parametrize(("more", "at_once"), [("", "mset"), ("&ttl_s=500", "exec")])
def test_header_and_payload_are_replaced_at_once(server: Server, more: str, at_once: str) -> None:
    """Else those of two writers mix, where equal keys do not mean equal data to the bit."""
    with supervised(url(server, more)) as storage:
        server.ask("CONFIG", "RESETSTAT")
        assert stored(storage, addresses(3), SIZE) == [OK] * 3
        told = server.ask("INFO", "commandstats")
        assert isinstance(told, bytes)
        assert f"cmdstat_{at_once}:calls=3,".encode() in told
        assert (b"cmdstat_set:" in told) is (at_once == "exec")


def test_a_value_with_a_time_to_live_goes(server: Server) -> None:
    with supervised(url(server, "&ttl_s=0.25")) as storage:
        assert stored(storage, addresses(3), SIZE) == [OK] * 3
        until(lambda: fetched(storage, addresses(3), SIZE) == [MISS] * 3)
    with supervised(url(server, "&ttl_s=500")) as storage:
        assert stored(storage, addresses(3), SIZE) == [OK] * 3
        for place in addresses(3):
            for name in Names.of(b"faults:", place.key):
                left = server.ask("PTTL", name)
                assert isinstance(left, int)
                assert 0 < left <= 500_000
    with supervised(url(server)) as storage:
        assert stored(storage, addresses(1), SIZE) == [OK]
        names = Names.of(b"faults:", addresses(1)[0].key)
        assert [server.ask("PTTL", name) for name in names] == [-1, -1]
