"""A slow store serves everybody in turn; waiting for it is no failure of it (S6, S10)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from kvgraft_storage import Access, BreakerState, Status, Storage, SupervisionLimits, Value
from kvgraft_testing.storage import MemoryBackend
from kvgraft_testing.storage.traffic import (
    FINGERPRINT,
    addresses,
    fetched,
    payload,
    settled,
    stored,
    until,
)

from .backends import Hanging, polled
from .clock import Clock

OK, DOWN, TIMEOUT = Status.OK, Status.DOWN, Status.TIMEOUT
SIZE = 64


class Slow(MemoryBackend):
    """Every call takes half a second of the test's time."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.most_at_once = self._at_once = 0
        self._counting = threading.Lock()

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        with self._counting:
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        self.clock.now += 0.5
        time.sleep(0.001)  # time for somebody to look at the clock
        told = super().get_into(keys, values, deadline_s)
        with self._counting:
            self._at_once -= 1
        return told


class Recording(Hanging):
    """Notes the first key of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, bytes]] = []

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.calls.append(("get", keys[0]))
        return super().get_into(keys, values, deadline_s)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self.calls.append(("set", keys[0]))
        return super().set_from(keys, values, deadline_s)


def buffers(n: int) -> list[bytearray]:
    return [bytearray(SIZE) for _ in range(n)]


def test_calls_that_wait_behind_a_slow_store_do_not_expire() -> None:
    clock = Clock()
    backend = Slow(clock)
    limits = SupervisionLimits(deadline_s=5, n_workers=1, batch_keys=8)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    places = addresses(64)
    stored(storage, places, SIZE)
    tickets = [storage.get(places, buffers(64)) for _ in range(8)]
    assert all(settled(ticket) == [OK] * 64 for ticket in tickets)
    assert clock.now > 100 + 64 * 0.5 - 1, "far longer than a call may take"
    assert storage.state is BreakerState.CLOSED
    assert backend.most_at_once == 1
    assert storage.close()


def test_a_small_ticket_does_not_wait_for_all_of_a_large_one() -> None:
    backend = Recording()
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(n_workers=1, batch_keys=1))
    places = addresses(12)
    stored(storage, places, SIZE)
    backend.calls.clear()
    backend.gate.clear()
    large = storage.get(places[:10], buffers(10))
    small = [storage.get([place], buffers(1)) for place in places[10:]]
    backend.gate.set()
    assert all(settled(ticket) == [OK] for ticket in small)
    assert settled(large) == [OK] * 10
    order = [key for _, key in backend.calls]
    assert all(order.index(place.key) <= 3 for place in places[10:])
    assert storage.close()


@pytest.mark.parametrize("flood", ["get", "set"])
def test_reads_and_writes_take_turns(flood: str) -> None:
    backend = Recording()
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(n_workers=1))
    places = addresses(9)
    stored(storage, places, SIZE)
    backend.calls.clear()
    backend.gate.clear()

    def ask(verb: str, number: int) -> object:
        if verb == "get":
            return storage.get([places[number]], buffers(1))
        return storage.set([places[number]], [payload(places[number], SIZE)])

    asked = [ask(flood, number) for number in range(8)]
    asked.append(ask("set" if flood == "get" else "get", 8))
    backend.gate.set()
    until(lambda: all(ticket.done for ticket in asked))  # type: ignore[attr-defined]
    assert [key for _, key in backend.calls].index(places[8].key) <= 2
    assert storage.close()


def test_waiting_too_long_is_given_up_and_is_no_failure_of_the_store() -> None:
    clock, backend = Clock(), Hanging()
    limits = SupervisionLimits(deadline_s=1000, queue_timeout_s=30, n_workers=1, failure_limit=1)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    places = addresses(3)
    stored(storage, places, SIZE)
    backend.gate.clear()
    running = storage.get(places[:1], buffers(1))
    until(lambda: backend.n_calls == 2)
    waiting = storage.get(places[1:], buffers(2))
    clock.now += 29
    assert not bool(waiting.done)  # mypy would hold the property for constant
    clock.now += 2
    assert waiting.done
    assert waiting.statuses == [TIMEOUT, TIMEOUT]
    assert waiting.error == "get: 30 s in line"
    assert storage.state is BreakerState.CLOSED
    assert storage.n_abandoned == 0
    counts = storage.counters.snapshot()
    assert counts["get.waited_too_long"] == 1
    assert "get.timeouts" not in counts
    backend.gate.set()
    assert settled(running) == [OK]
    assert storage.close()


def test_a_ticket_that_is_served_now_and_then_does_not_wait_too_long() -> None:
    clock, backend = Clock(), Recording()
    limits = SupervisionLimits(deadline_s=1000, queue_timeout_s=30, n_workers=1, batch_keys=1)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    places = addresses(8)
    stored(storage, places, SIZE)
    backend.get_into = _passing(backend, clock, 20)  # type: ignore[method-assign, assignment]
    assert settled(storage.get(places, buffers(8))) == [OK] * 8
    assert storage.close()


def test_a_ticket_whose_call_takes_longer_than_it_may_wait_is_served() -> None:
    clock, backend = Clock(), Hanging()
    limits = SupervisionLimits(deadline_s=5, queue_timeout_s=1, n_workers=1, batch_keys=1)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    places = addresses(3)
    stored(storage, places, SIZE)
    backend.gate.clear()
    before = backend.n_calls
    ticket = storage.get(places, buffers(3))
    until(lambda: backend.n_calls > before)
    clock.now += 2
    assert not ticket.decided
    backend.gate.set()
    assert settled(ticket) == [OK] * 3
    storage.close()


def _passing(backend: MemoryBackend, clock: Clock, seconds: float) -> object:
    given = backend.get_into

    def get_into(
        keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        clock.now += seconds
        return given(keys, values, deadline_s)

    return get_into


def test_a_ticket_that_is_cancelled_in_line_is_never_asked_for() -> None:
    backend = Recording()
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(n_workers=1, batch_keys=1))
    places = addresses(4)
    stored(storage, places, SIZE)
    backend.calls.clear()
    backend.gate.clear()
    running = storage.get(places[:1], buffers(1))
    until(lambda: backend.calls)
    waiting = storage.get(places[1:], buffers(3))
    waiting.cancel()
    assert waiting.done
    assert waiting.statuses == [TIMEOUT] * 3
    backend.gate.set()
    assert settled(running) == [OK]
    assert settled(storage.get(places[:1], buffers(1))) == [OK]
    assert {key for _, key in backend.calls} == {places[0].key}
    assert storage.close()


def test_a_deadline_begins_when_the_store_is_called() -> None:
    """The one that hangs is given up; the one behind it has all of its time."""
    clock, backend = Clock(), Hanging()
    limits = SupervisionLimits(deadline_s=5, n_workers=1, failure_limit=9)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    places = addresses(2)
    stored(storage, places, SIZE)
    backend.gate.clear()
    first = storage.get(places[:1], buffers(1))
    until(lambda: backend.n_calls == 2)
    second = storage.get(places[1:], buffers(1))
    clock.now += 5.1
    assert first.done
    until(lambda: backend.n_calls == 3)
    clock.now += 4.9
    assert not second.done
    backend.gate.set()
    assert settled(second) == [OK]
    assert storage.close()


class Failing(MemoryBackend):
    """Raises in the verbs named; says it is healthy."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: set[str] = set()

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        self._fail("exists")
        return super().exists(keys)

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self._fail("get")
        return super().get_into(keys, values, deadline_s)

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        self._fail("set")
        return super().set_from(keys, values, deadline_s)

    def _fail(self, verb: str) -> None:
        if verb in self.failing:
            raise OSError(f"{verb} fails")


@pytest.mark.parametrize("failing", [{"get"}, {"exists", "get"}, {"set"}])
def test_a_verb_that_always_fails_opens_the_breaker_though_others_succeed(
    failing: set[str],
) -> None:
    """Between two failures the store says what it has, and takes or hands out data."""
    clock, backend = Clock(), Failing()
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(cooldown_s=10), clock)
    places = addresses(1)
    stored(storage, places, SIZE)
    backend.failing = failing

    def turn() -> tuple[list[Status | None], list[Status | None]]:
        settled(storage.exists(places))
        told = settled(storage.set(places, [payload(places[0], SIZE)], only_missing=True))
        again = settled(storage.set(places, [payload(places[0], SIZE)]))
        return fetched(storage, places, SIZE), told if told != [OK] else again

    for _ in range(4):
        read, written = turn()
    bad, good = (Access.WRITE, Access.READ) if "set" in failing else (Access.READ, Access.WRITE)
    states = [storage.state_of(bad), storage.state_of(good), storage.state]
    assert states == [BreakerState.OPEN, BreakerState.CLOSED, BreakerState.OPEN]
    assert (read, written) == (([OK], [DOWN]) if "set" in failing else ([DOWN], [OK]))
    clock.now += 11  # the store says that it is healthy: one more failure is enough
    until(lambda: polled(storage).state is BreakerState.CLOSED)
    turn()
    assert storage.state_of(bad) is BreakerState.OPEN
    backend.failing = set()
    clock.now += 100
    until(lambda: polled(storage).state is BreakerState.CLOSED)
    turn()
    assert turn() == ([OK], [OK])
    assert storage.state is BreakerState.CLOSED
    assert storage.close()


def test_waiting_calls_are_down_at_once_when_the_breaker_opens() -> None:
    clock, backend = Clock(), Hanging()
    limits = SupervisionLimits(deadline_s=5, n_workers=1, failure_limit=1)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    backend.gate.clear()
    storage.get(addresses(1), buffers(1))
    until(lambda: backend.n_calls == 1)
    waiting = storage.get(addresses(9), buffers(9))
    clock.now += 6
    assert waiting.done
    assert waiting.statuses == [DOWN] * 9
    backend.gate.set()
    assert storage.close()
