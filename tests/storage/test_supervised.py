"""With any backend the scheduler sees misses in time, and goes on (S6, S9, S10, S11)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest

from kvgraft.errors import ConfigError
from kvgraft_storage import BreakerState, Capabilities, Status, Storage, SupervisionLimits, Value
from kvgraft_storage.payload import encode_header
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

from .backends import Hanging, Raising, polled
from .clock import Clock

OK, MISS, DOWN, TIMEOUT = Status.OK, Status.MISS, Status.DOWN, Status.TIMEOUT
LIMITS = SupervisionLimits(
    deadline_s=5, n_workers=2, max_abandoned=2, failure_limit=3, cooldown_s=10, cooldown_limit_s=25
)
SIZE = 3000


def test_a_call_that_hangs_times_out_and_another_thread_takes_over() -> None:
    clock, backend = Clock(), Hanging()
    storage = Storage(FINGERPRINT, backend, LIMITS, clock)
    places = addresses(2)
    assert stored(storage, places, SIZE) == [OK, OK]
    backend.gate.clear()
    buffer = bytearray(SIZE)
    ticket = storage.get(places[:1], [buffer])
    until(lambda: backend.n_calls == 2)
    assert not bool(ticket.done)  # mypy would hold the property for constant
    clock.now += 5.1
    assert ticket.done
    assert ticket.statuses == [TIMEOUT]
    assert storage.n_abandoned == 1
    backend.gate.set()
    until(lambda: storage.n_abandoned == 0)
    assert buffer == bytes(SIZE), "a call that had timed out wrote to memory given back"
    assert fetched(storage, places, SIZE) == [OK, OK]
    assert storage.counters.snapshot()["get.timeouts"] == 1
    assert storage.close()


def test_memory_lent_to_a_synchronous_backend_is_given_back_when_its_call_returns() -> None:
    clock, backend = Clock(), Hanging(synchronous=True)
    storage = Storage(FINGERPRINT, backend, LIMITS, clock)
    places = addresses(1)
    stored(storage, places, SIZE)
    backend.gate.clear()
    ticket = storage.get(places, [bytearray(SIZE)])
    until(lambda: backend.n_calls == 2)
    clock.now += 6
    assert ticket.decided
    assert ticket.statuses == [TIMEOUT]
    assert not ticket.done
    backend.gate.set()
    until(lambda: ticket.done)
    assert ticket.statuses == [TIMEOUT]
    assert storage.close()


def test_memory_that_is_not_lent_is_the_callers_at_the_deadline_although_a_call_hangs() -> None:
    clock, backend = Clock(), Hanging(synchronous=True)
    storage = Storage(FINGERPRINT, backend, replace(LIMITS, lend_memory=False), clock)
    places = addresses(1)
    stored(storage, places, SIZE)
    backend.gate.clear()
    buffer = bytearray(SIZE)
    ticket = storage.get(places, [buffer])
    until(lambda: backend.n_calls == 2)
    clock.now += 6
    assert ticket.done
    assert ticket.statuses == [TIMEOUT]
    backend.gate.set()
    until(lambda: storage.n_abandoned == 0)
    assert buffer == bytes(SIZE), "a call that had timed out wrote to memory given back"
    assert fetched(storage, places, SIZE) == [OK]
    assert storage.close()


def test_threads_left_behind_are_bounded_and_come_back() -> None:
    clock, backend = Clock(), Hanging()
    limits = SupervisionLimits(deadline_s=5, n_workers=1, max_abandoned=2, failure_limit=100)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    backend.gate.clear()
    before = {*threading.enumerate()}
    for number in range(3):
        ticket = storage.get(addresses(1), [bytearray(SIZE)])
        until(lambda number=number: backend.n_calls == number + 1)  # type: ignore[misc]
        clock.now += 6
        assert settled(ticket) == [TIMEOUT]
    assert storage.n_abandoned == 3
    assert storage.state is BreakerState.OPEN, "nobody is left to call"
    assert len({*threading.enumerate()} - before) == 2
    assert storage.get(addresses(1), [bytearray(SIZE)]).statuses == [DOWN]
    backend.gate.set()
    until(lambda: storage.n_abandoned == 0)
    clock.now += 2
    until(lambda: polled(storage).state is BreakerState.CLOSED)
    assert fetched(storage, addresses(1), SIZE) == [MISS]
    assert storage.close()


def test_a_breaker_opens_costs_nothing_and_closes_by_itself() -> None:
    clock, backend = Clock(), Hanging()
    storage = Storage(FINGERPRINT, backend, LIMITS, clock)
    places = addresses(1)
    stored(storage, places, SIZE)
    backend.gate.clear()
    for number in range(3):
        ticket = storage.get(places, [bytearray(SIZE)])
        until(lambda number=number: backend.n_calls == number + 2)  # type: ignore[misc]
        clock.now += 6
        assert settled(ticket) == [TIMEOUT]
    assert storage.state is BreakerState.OPEN
    calls = backend.n_calls
    assert [storage.get(places, [bytearray(SIZE)]).statuses for _ in range(5)] == [[DOWN]] * 5
    assert backend.n_calls == calls
    backend.gate.set()
    until(lambda: not storage.n_abandoned)
    assert storage.get(places, [bytearray(SIZE)]).statuses == [DOWN], "before the cooldown is over"
    clock.now += 11
    storage.poll()
    until(lambda: storage.state is BreakerState.CLOSED)
    assert fetched(storage, places, SIZE) == [OK]
    counts = storage.counters.snapshot()
    assert counts["breaker.trials"] == 1
    assert counts["get.down"] == 6
    assert storage.close()


def test_a_trial_that_no_worker_had_time_for_is_made_again() -> None:
    """It expires in the queue, behind a call with a longer deadline or while time leaps."""
    clock, backend = Clock(), Hanging()
    limits = SupervisionLimits(deadline_s=5, max_abandoned=0, failure_limit=1, cooldown_s=10)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    backend.gate.clear()
    buffers = [bytearray(SIZE) for _ in range(2)]
    storage.get(addresses(1), buffers[:1], deadline_s=1000)
    storage.get(addresses(1), buffers[1:])
    until(lambda: backend.n_calls == 2)
    for leap in (6, 11, 6):  # the second times out, a trial is queued, and expires
        clock.now += leap
        storage.poll()
    assert storage.counters.snapshot()["trial.timeouts"] == 1
    backend.gate.set()
    until(lambda: storage.n_abandoned == 0)
    clock.now += 100
    storage.poll()
    until(lambda: storage.state is BreakerState.CLOSED, 3)
    assert stored(storage, addresses(1), SIZE) == [OK]
    assert storage.close()


def test_a_trial_that_fails_makes_the_cooldown_longer() -> None:
    clock, backend = Clock(), Raising()
    storage = Storage(FINGERPRINT, backend, LIMITS, clock)
    backend.fault = RuntimeError("gone")
    backend.closed = True  # not healthy
    for _ in range(3):
        assert fetched(storage, addresses(1), SIZE) == [DOWN]
    waits = []
    for _ in range(4):
        assert storage.state is BreakerState.OPEN
        trials = storage.counters.snapshot().get("breaker.trials", 0)
        start = clock.now
        while storage.counters.snapshot().get("breaker.trials", 0) == trials:
            clock.now += 1
            storage.poll()
        until(lambda: storage.state is not BreakerState.HALF_OPEN)
        waits.append(round(clock.now - start))
    assert waits == [10, 20, 25, 25]
    backend.closed, backend.fault = False, None
    clock.now += 26
    storage.poll()
    until(lambda: storage.state is BreakerState.CLOSED)
    assert fetched(storage, addresses(1), SIZE) == [MISS]
    assert storage.close()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (ConnectionError("no\nserver"), "get: ConnectionError: no server"),
        (SystemExit(3), "get: SystemExit: 3"),
        ([OK], "get: answered 1 of 2 keys"),
        ([OK, True], "get: answered True, which is no Status"),
    ],
)
def test_a_backends_exceptions_and_wrong_answers_are_down_and_reported(
    fault: object, said: str
) -> None:
    backend = Raising()
    storage = Storage(FINGERPRINT, backend)
    backend.fault = fault  # type: ignore[assignment]
    ticket = storage.get(addresses(2), [bytearray(SIZE)] * 2)
    assert settled(ticket) == [DOWN, DOWN]
    assert ticket.error == storage.last_error == said
    assert storage.counters.snapshot()["get.errors"] == 1
    backend.fault = None
    assert fetched(storage, addresses(2), SIZE) == [MISS, MISS]
    assert storage.close()


def test_wrong_payloads_are_counted_and_removed() -> None:
    backend = MemoryBackend()
    storage = Storage(FINGERPRINT, backend)
    places = addresses(5)
    stored(storage, places, SIZE)
    keys = [place.key for place in places]
    header, data = backend.stored[keys[0]]
    backend.stored[keys[0]] = header, data[:-1] + bytes([data[-1] ^ 1])
    backend.stored[keys[1]] = backend.stored[keys[4]]
    backend.stored[keys[2]] = header[:-1] + bytes([header[-1] ^ 1]), data
    longer = bytes(SIZE + 1)
    backend.stored[keys[3]] = encode_header(places[3], FINGERPRINT.digest, longer), longer
    wrong = [Status.CORRUPT, Status.STALE, Status.CORRUPT, Status.TOO_LARGE]
    assert fetched(storage, places, SIZE) == [*wrong, OK]
    assert storage.counters.snapshot()["discard.ok"] == 4
    assert list(backend.stored) == keys[4:]
    assert fetched(storage, places, SIZE) == [MISS] * 4 + [OK]
    counts = storage.counters.snapshot()
    assert (counts["get.corrupt"], counts["get.stale"], counts["get.too_large"]) == (2, 1, 1)
    assert storage.close()


def test_a_call_is_cut_into_batches_and_its_keys_stay_in_order() -> None:
    limits = SupervisionLimits(batch_nbytes=2 * SIZE, batch_keys=3)
    storage = Storage(FINGERPRINT, MemoryBackend(max_payload_nbytes=2 * SIZE), limits)
    places = addresses(7)
    sizes = [SIZE, SIZE, SIZE, 3 * SIZE, 1, 1, 1]
    told = settled(
        storage.set(places, [payload(place, size) for place, size in zip(places, sizes)])
    )
    assert told == [OK, OK, OK, Status.TOO_LARGE, OK, OK, OK]
    ticket = storage.get(places, [bytearray(size) for size in sizes])
    assert settled(ticket) == [OK, OK, OK, MISS, OK, OK, OK]
    assert ticket.n_leading_ok == 3
    assert storage.close()


def test_the_calls_of_one_ticket_are_made_by_several_workers_at_once() -> None:
    backend = Hanging()
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(n_workers=3, batch_keys=1))
    backend.gate.clear()
    ticket = storage.get(addresses(4), [bytearray(SIZE) for _ in range(4)])
    until(lambda: backend.n_calls == 3)
    backend.gate.set()
    assert settled(ticket) == [MISS] * 4
    assert storage.close()


def test_a_backend_gets_payloads_in_batches_of_the_sizes_it_likes() -> None:
    class Choosy(MemoryBackend):
        capabilities = Capabilities(batch_set_nbytes=2 * SIZE, batch_get_nbytes=3 * SIZE)
        calls: ClassVar[list[tuple[str, int]]] = []

        def set_from(
            self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
        ) -> Sequence[Status]:
            self.calls.append(("set", len(keys)))
            return super().set_from(keys, values, deadline_s)

        def get_into(
            self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
        ) -> Sequence[Status]:
            self.calls.append(("get", len(keys)))
            return super().get_into(keys, values, deadline_s)

    storage = Storage(FINGERPRINT, Choosy(), SupervisionLimits(n_workers=1, batch_keys=9))
    places = addresses(7)
    sizes = [SIZE, SIZE, SIZE, 3 * SIZE, 1, 1, 1]
    payloads = [payload(place, size) for place, size in zip(places, sizes)]
    assert settled(storage.set(places, payloads)) == [OK] * 7
    assert settled(storage.get(places, [bytearray(size) for size in sizes])) == [OK] * 7
    sets = [("set", 2), ("set", 1), ("set", 1), ("set", 3)]
    assert Choosy.calls == [*sets, ("get", 3), ("get", 1), ("get", 3)]
    assert storage.close()


@pytest.mark.parametrize(
    "told",
    [
        None,
        Capabilities(max_payload_nbytes=0),
        Capabilities(max_payload_nbytes=True),
        Capabilities(batch_set_nbytes="2M"),  # type: ignore[arg-type]
        Capabilities(batch_get_nbytes=0),
        Capabilities(synchronous="false"),  # type: ignore[arg-type]
    ],
)
def test_a_backend_without_capabilities_is_not_attached(told: object) -> None:
    class Vague(MemoryBackend):
        capabilities = told  # type: ignore[assignment]

    storage = Storage(FINGERPRINT)
    with pytest.raises(ConfigError, match=r"storage: Vague\.capabilities.* (is|give|return) "):
        storage.attach(Vague())
    assert not storage.attached
    assert storage.store_number == 0
    storage.attach(MemoryBackend())
    assert storage.close()


def test_a_backend_whose_capabilities_raise_is_not_attached() -> None:
    class Failing(MemoryBackend):
        @property
        def capabilities(self) -> Capabilities:
            raise RuntimeError("no answer")

    with pytest.raises(ConfigError, match=r"Failing does not give .* RuntimeError: no answer"):
        Storage(FINGERPRINT, Failing())


def test_a_call_that_is_cancelled_gives_the_memory_back_and_changes_nothing_later() -> None:
    backend = Hanging()
    limits = SupervisionLimits(n_workers=1, deadline_s=60)
    storage = Storage(FINGERPRINT, backend, limits)
    places = addresses(2)
    stored(storage, places, SIZE)
    backend.gate.clear()
    buffers = [bytearray(SIZE), bytearray(SIZE)]
    first = storage.get(places[:1], buffers[:1])
    second = storage.get(places[1:], buffers[1:])
    until(lambda: backend.n_calls == 2)
    first.cancel()
    second.cancel()
    assert first.done
    assert second.done
    assert first.statuses == second.statuses == [TIMEOUT]
    backend.gate.set()
    assert fetched(storage, places, SIZE) == [OK, OK]
    assert buffers == [bytes(SIZE)] * 2
    assert storage.close()


def test_a_store_is_detached_while_it_serves_and_another_is_attached() -> None:
    backend = Hanging()
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(deadline_s=60))
    places = addresses(3)
    stored(storage, places, SIZE)
    backend.gate.clear()
    running = storage.get(places, [bytearray(SIZE)] * 3)
    leaving = storage.detach(60)
    assert not leaving.done
    assert storage.detach() is leaving
    assert storage.get(places, [bytearray(SIZE)] * 3).statuses == [DOWN] * 3
    with pytest.raises(ConfigError, match="still being detached; detach it and wait"):
        storage.attach(MemoryBackend())
    assert not bool(backend.closed)  # mypy would hold it for constant
    backend.gate.set()
    assert settled(running) == [OK] * 3
    assert leaving.wait(20)
    assert leaving.value is True
    assert backend.closed
    storage.attach(MemoryBackend())
    assert stored(storage, places, SIZE) == [OK] * 3
    with pytest.raises(ConfigError, match="a store is attached; detach it"):
        storage.attach(MemoryBackend())
    assert storage.close()


def test_a_store_that_hangs_is_let_go_of_at_the_deadline() -> None:
    clock, backend = Clock(), Hanging()
    storage = Storage(FINGERPRINT, backend, LIMITS, clock)
    backend.gate.clear()
    running = storage.get(addresses(1), [bytearray(SIZE)], 100.0)
    leaving = storage.detach(5.0)
    until(lambda: backend.n_calls == 1)
    clock.now += 6
    assert leaving.done
    assert leaving.value is None
    storage.attach(MemoryBackend())
    assert fetched(storage, addresses(1), SIZE) == [MISS]
    backend.gate.set()
    until(lambda: backend.closed)
    until(lambda: running.done)
    assert running.statuses[0] in (MISS, DOWN)
    assert storage.close()


def test_without_a_store_everything_is_down() -> None:
    storage = Storage(FINGERPRINT)
    assert not storage.attached
    assert storage.state is None
    assert storage.set(addresses(1), [b"x"]).statuses == [DOWN]
    flush = storage.flush()
    assert flush.done
    assert flush.value is None
    assert storage.close()


def test_buffers_that_cannot_be_used_are_refused() -> None:
    storage = Storage(FINGERPRINT, MemoryBackend())
    one = addresses(1)
    with pytest.raises(ConfigError, match="1 addresses and 2 buffers"):
        storage.get(one, [bytearray(1)] * 2)
    with pytest.raises(ConfigError, match="buffer 0 is read-only"):
        storage.get(one, [b"x"])
    with pytest.raises(ConfigError, match="buffer 0 is empty"):
        storage.set(one, [b""])
    with pytest.raises(ConfigError, match="buffer 0 is a str"):
        storage.set(one, ["x"])
    with pytest.raises(ConfigError, match="contiguous"):
        storage.set(one, [memoryview(bytes(10))[::2]])
    assert storage.close()


def test_questions_are_answered_by_ticket() -> None:
    storage = Storage(FINGERPRINT, MemoryBackend())
    stored(storage, addresses(2), 10)
    asked = storage.ask("stats", lambda store: store.stats().n_records)
    assert asked.wait(20)
    assert asked.value == 2
    assert settled(storage.exists(addresses(3))) == [OK, OK, MISS]
    assert settled(storage.remove(addresses(3))) == [OK, OK, MISS]
    assert storage.close()


def test_storage_imports_no_torch() -> None:
    from ..commands import run

    code = "import sys, kvgraft_storage, kvgraft_file; assert 'torch' not in sys.modules"
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
