"""`kvgraft_storage` without a cache: foreign hashes, threads, completions, parts, hints, events."""

from __future__ import annotations

import random
import select
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from kvgraft.errors import ConfigError
from kvgraft_storage import (
    Access,
    Address,
    Capabilities,
    Change,
    EventLog,
    Fingerprint,
    Status,
    Storage,
    StorageTicket,
    StoreEvent,
    SupervisionLimits,
)
from kvgraft_storage.memory import Buffers
from kvgraft_testing.storage import MemoryBackend
from kvgraft_testing.storage.traffic import (
    FINGERPRINT,
    LONGEST_S,
    addresses,
    fetched,
    payload,
    settled,
    stored,
    until,
)

from ..commands import run
from .backends import Hanging, Raising
from .clock import Clock

OK, MISS, DOWN, TIMEOUT = Status.OK, Status.MISS, Status.DOWN, Status.TIMEOUT
SIZE = 3000
DIGEST = bytes(range(32))

ALONE = """
import sys, tempfile
from kvgraft_storage import Fingerprint, Status, Storage, open_storage

fingerprint = Fingerprint("m", "1", "bf16", 16, {"kv": (8, True)})
with tempfile.TemporaryDirectory() as directory:
    storage = Storage(fingerprint, open_storage(f"file:{directory}?capacity=1MiB"))
    place = storage.address(bytes(32))
    done, found = storage.completions(), bytearray(100)
    done.watch(storage.set([place], [b"x" * 100]))
    assert done.wait(30) and done.take()[0].statuses == [Status.OK]
    done.watch(storage.get([place], [found]))
    assert done.wait(30) and done.take()[0].statuses == [Status.OK]
    assert found == b"x" * 100 and storage.close()
print(*sys.modules)
"""
"""A store used by itself; prints the modules loaded."""

NOT_NEEDED = ("torch", "kvgraft.cache", "kvgraft.tree", "kvgraft_storage.tier", "kvgraft.requests")


def test_a_store_is_used_without_cache_tree_and_torch() -> None:
    done = run(sys.executable, "-c", ALONE)
    assert (done.returncode, done.stderr) == (0, "")
    loaded = done.stdout.split()
    assert "kvgraft_file.store" in loaded
    assert [
        name for name in loaded if f"{name}.".startswith(tuple(f"{n}." for n in NOT_NEEDED))
    ] == []


# -- names


def test_a_foreign_address_depends_on_fingerprint_digest_group_and_namespace() -> None:
    other = Fingerprint("model", "revision", "bf16", 4, {"a": 2})
    keys = {
        Address.foreign(FINGERPRINT, DIGEST),
        Address.foreign(other, DIGEST),
        Address.foreign(FINGERPRINT, DIGEST[:-1]),
        Address.foreign(FINGERPRINT, DIGEST[:-1] + b"k", "v"),
        Address.foreign(FINGERPRINT, DIGEST, "1"),
        Address.foreign(FINGERPRINT, DIGEST, namespace="tenant"),
    }
    assert len({place.key for place in keys}) == 6
    assert Address.foreign(FINGERPRINT, DIGEST) == Storage(FINGERPRINT).address(DIGEST)
    assert Address.foreign(FINGERPRINT, DIGEST).key.hex().startswith("453d559ce06960bc2950")


@pytest.mark.parametrize(
    ("fingerprint", "digest", "group", "said"),
    [
        (None, DIGEST, "kv", "None is a NoneType, not a Fingerprint"),
        (FINGERPRINT, "ab" * 16, "kv", "is a str, not bytes; give the engine's block hash"),
        (FINGERPRINT, b"1234567", "kv", "digest has 7 bytes, not 8 to 256"),
        (FINGERPRINT, DIGEST, "", "its name has 0 bytes in storage, 1 to 64"),
    ],
)
def test_a_foreign_address_that_cannot_be_told_apart_is_refused(
    fingerprint: object, digest: object, group: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Address.foreign(fingerprint, digest, group)  # type: ignore[arg-type]


def test_data_of_another_fingerprint_is_neither_read_nor_removed() -> None:
    backend = MemoryBackend()
    mine = Storage(FINGERPRINT, backend)
    assert settled(mine.set([mine.address(DIGEST)], [b"mine"])) == [OK]
    other = Storage(Fingerprint("model", "revision", "bf16", 4, {"a": 2}), backend)
    assert settled(other.get([other.address(DIGEST)], [bytearray(4)])) == [MISS]
    assert len(backend.stored) == 1
    assert settled(mine.get([mine.address(DIGEST)], [bytearray(4)])) == [OK]
    assert other.close()
    assert mine.close()


# -- completions


def test_completions_hand_each_ticket_out_once_in_the_order_in_which_they_ended() -> None:
    backend = Hanging()
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(n_workers=1))
    done, places = storage.completions(), addresses(4)
    backend.gate.clear()
    first = done.watch(storage.set(places, [payload(each, SIZE) for each in places]), "first")
    until(lambda: backend.n_calls)
    second = done.watch(storage.exists(places), tag="second")
    assert done.take() == []
    assert not done.wait(0)
    assert done.n_pending == 2
    assert repr(second) == f"<StorageTicket: {len(places)} pending, under way>"
    third = done.watch(storage.exists([]), tag="third")  # nothing to do: done at once
    assert done.take() == [third]
    backend.gate.set()
    until(lambda: len(done) == 2)
    taken = done.take(1) + done.take()
    assert taken == [first, second]
    assert [each.tag for each in taken] == ["first", "second"]
    assert done.take() == []
    assert done.n_pending == 0
    with pytest.raises(ConfigError, match="is watched already"):
        done.watch(first)
    assert done.n_pending == 0
    assert storage.close()


def test_tickets_that_end_otherwise_come_out_as_well() -> None:
    clock, backend = Clock(), Hanging()
    limits = SupervisionLimits(deadline_s=5, n_workers=1, queue_timeout_s=50)
    storage = Storage(FINGERPRINT, backend, limits, clock)
    done, place = storage.completions(), addresses(1)
    backend.gate.clear()
    done.watch(storage.get(place, [bytearray(SIZE)]), "hangs")
    until(lambda: backend.n_calls)
    done.watch(storage.get(place, [bytearray(SIZE)]), "cancelled").cancel()
    assert [each.tag for each in done.take()] == ["cancelled"]
    clock.now += 6
    assert [each.tag for each in done.take()] == ["hangs"]
    done.watch(storage.detach(0), "closed")
    clock.now += 1
    done.watch(storage.get(place, [bytearray(SIZE)]), "refused")
    assert {each.tag for each in done.take()} == {"closed", "refused"}
    backend.gate.set()


def test_memory_lent_to_a_hung_call_keeps_its_ticket_out_of_the_completions() -> None:
    clock, backend = Clock(), Hanging(synchronous=True)
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(deadline_s=5), clock)
    done = storage.completions()
    backend.gate.clear()
    done.watch(storage.get(addresses(1), [bytearray(SIZE)]))
    until(lambda: backend.n_calls)
    clock.now += 6
    assert done.take() == []
    backend.gate.set()
    assert done.wait(LONGEST_S)
    assert [each.statuses for each in done.take()] == [[TIMEOUT]]
    assert storage.close()


def test_a_descriptor_is_readable_while_a_ticket_can_be_taken() -> None:
    storage = Storage(FINGERPRINT, MemoryBackend())
    done = storage.completions()

    def is_readable(timeout_s: float = 0) -> bool:
        return bool(select.select([done], [], [], timeout_s)[0])

    assert not is_readable()
    for _ in range(2):
        done.watch(storage.exists(addresses(1)))
        assert is_readable(LONGEST_S)
    until(lambda: len(done) == 2)
    assert len(done.take(1)) == 1
    assert is_readable()
    assert len(done.take()) == 1
    assert not is_readable()
    done.close()
    with pytest.raises(ConfigError, match="completions: closed"):
        done.fileno()
    with pytest.raises(ConfigError, match="completions: closed"):
        done.watch(storage.exists(addresses(1)))
    assert storage.close()


# -- threads

N_THREADS, N_ROUNDS = 6, 40


def test_threads_submit_poll_cancel_and_close_at_once() -> None:
    """Every ticket ends, comes out of its queue once, and no bytes are wrong."""
    backend = MemoryBackend(capacity_nbytes=200 * SIZE)
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(n_workers=3, batch_keys=2))
    places = addresses(24)
    done = storage.completions()
    submitted: list[StorageTicket] = []
    taken: Counter[int] = Counter()
    reads: list[tuple[StorageTicket, list[Address], list[bytearray]]] = []
    failures: list[BaseException] = []
    start = threading.Barrier(N_THREADS + 1)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        start.wait()
        for _ in range(N_ROUNDS):
            some = rng.sample(places, 3)
            buffers = [bytearray(SIZE) for _ in some]
            kind = rng.randrange(4)
            if kind == 0:
                ticket = storage.set(some, [payload(each, SIZE) for each in some])
            elif kind == 1:
                ticket = storage.exists(some)
            else:
                ticket = storage.get(some, buffers)
                reads.append((ticket, some, buffers))
            submitted.append(done.watch(ticket))
            if rng.random() < 0.2:
                ticket.cancel()
            storage.probably_has(some)
            for each in done.take(rng.randrange(4)):
                taken[id(each)] += 1

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except BaseException as failure:  # noqa: BLE001 - told in the test's thread
            failures.append(failure)

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(N_THREADS)]
    for thread in threads:
        thread.start()
    start.wait()
    until(lambda: len(submitted) > N_THREADS * N_ROUNDS // 2 or failures)
    leaving = [storage.detach(LONGEST_S)]  # later calls are refused
    for thread in threads:
        thread.join(LONGEST_S)
    assert failures == []
    assert storage.close()
    assert leaving[0] is storage.detach()
    while done.n_pending:
        assert done.wait(LONGEST_S)
        for each in done.take():
            taken[id(each)] += 1
    assert set(taken.values()) == {1}
    assert taken.keys() == {id(each) for each in submitted}
    assert len(submitted) == N_THREADS * N_ROUNDS
    for ticket, some, buffers in reads:
        assert None not in ticket.statuses
        for place, status, buffer in zip(some, ticket.statuses, buffers):
            assert status is not OK or buffer == payload(place, SIZE)


def test_a_call_that_is_submitted_while_the_store_is_detached_is_refused() -> None:
    storage = Storage(FINGERPRINT, MemoryBackend())

    class Leaving(Buffers):
        """Another thread detaches while the call is being made."""

        def __len__(self) -> int:
            return 1

        def __getitem__(self, part: slice) -> list[memoryview]:
            return [memoryview(bytearray(SIZE))]

        def sizes(self) -> Iterator[int]:
            assert storage.detach().wait(LONGEST_S)
            yield SIZE

    assert settled(storage.get(addresses(1), Leaving())) == [DOWN]


def test_only_one_of_many_threads_attaches_a_store() -> None:
    storage = Storage(FINGERPRINT)
    start = threading.Barrier(8)
    refused: list[ConfigError] = []

    def attach() -> None:
        start.wait()
        try:
            storage.attach(MemoryBackend())
        except ConfigError as error:
            refused.append(error)

    threads = [threading.Thread(target=attach) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    assert len(refused) == 7
    assert storage.store_number == 1
    assert storage.close()


# -- parts


@pytest.mark.parametrize("claims", [{"synchronous", "scatter"}, {"synchronous"}, {"scatter"}, {}])
def test_parts_are_stored_and_read_as_one_payload(claims: set[str]) -> None:
    class Backend(MemoryBackend):
        @property
        def capabilities(self) -> Capabilities:
            can = {name: name in claims for name in ("synchronous", "scatter")}
            return super().capabilities._replace(**can)

    storage = Storage(FINGERPRINT, Backend())
    (place,) = addresses(1)
    whole = payload(place, SIZE)
    assert settled(storage.set([place], [[whole[:7], whole[7:2000], whole[2000:]]])) == [OK]
    assert fetched(storage, [place], SIZE) == [OK]
    parts = (bytearray(1), bytearray(SIZE - 1))
    assert settled(storage.get([place], [parts])) == [OK]
    assert b"".join(parts) == whole
    assert settled(storage.get([place], [[bytearray(SIZE)]])) == [OK]
    short = [bytearray(10), bytearray(SIZE - 11)]
    assert settled(storage.get([place], [short])) == [Status.TOO_LARGE]
    assert storage.close()


def test_damage_in_any_part_is_found() -> None:
    backend = MemoryBackend()
    storage = Storage(FINGERPRINT, backend)
    (place,) = addresses(1)
    for byte in (0, SIZE // 2, SIZE - 1):
        stored(storage, [place], SIZE)
        header, data = backend.stored[place.key]
        damaged = bytearray(data)
        damaged[byte] ^= 1
        backend.stored[place.key] = header, bytes(damaged)
        parts = [bytearray(SIZE // 2), bytearray(SIZE - SIZE // 2)]
        assert settled(storage.get([place], [parts])) == [Status.CORRUPT]
    assert storage.close()


def test_parts_that_cannot_be_used_are_refused() -> None:
    storage = Storage(FINGERPRINT, MemoryBackend())
    for buffer, said in (
        ([], "buffer 0 has no parts"),
        ([bytearray(1), b"x"], "buffer 0 is read-only"),
        ([bytearray(1), bytearray()], "buffer 0 is empty"),
        ([bytearray(1), [bytearray(1)]], "buffer 0 is a list"),
    ):
        with pytest.raises(ConfigError, match=said):
            storage.get(addresses(1), [buffer])
    assert storage.close()


# -- presence


class Quiet(MemoryBackend):
    """Knows nothing by itself, as a server's client, and logs nothing."""

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(events=False)

    def probably_has(self, keys: object) -> list[bool | None]:
        return [None] * len(keys)  # type: ignore[arg-type]


def test_presence_is_hinted_from_the_last_answers() -> None:
    clock = Clock()
    limits = SupervisionLimits(hinted_keys=3, hint_absent_s=1)
    storage = Storage(FINGERPRINT, Quiet(), limits, clock)
    places = addresses(3)
    assert storage.probably_has(places) == [None] * 3
    stored(storage, places[:1], SIZE)
    settled(storage.exists(places[1:2]))
    assert storage.probably_has(places) == [True, False, None]
    clock.now += 1
    assert storage.probably_has(places) == [True, None, None], "others may have stored it since"
    settled(storage.remove(places[:1]))
    assert storage.probably_has(places[:1]) == [False]
    stored(storage, addresses(4), SIZE)
    assert storage.probably_has(addresses(4)) == [None, True, True, True], "three are remembered"
    assert settled(storage.clear()) == []
    assert storage.probably_has(places) == [None] * 3
    assert storage.close()
    assert storage.probably_has(places) == [False] * 3


def test_presence_is_not_hinted_while_reads_are_left_alone() -> None:
    backend = Raising()
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(failure_limit=1))
    places = addresses(1)
    stored(storage, places, SIZE)
    assert storage.probably_has(places) == [True]
    backend.fault = OSError("gone")
    assert fetched(storage, places, SIZE) == [DOWN]
    assert storage.probably_has(places) == [False]
    assert storage.state_of(Access.READ) is not None


def test_a_backend_whose_hints_raise_or_are_too_few_has_none() -> None:
    class Odd(Quiet):
        fault: Exception | None = None

        def probably_has(self, keys: object) -> list[bool | None]:
            if self.fault is not None:
                raise self.fault
            return [True]

    backend = Odd()
    storage = Storage(FINGERPRINT, backend)
    assert storage.probably_has(addresses(2)) == [None, None]
    backend.fault = RuntimeError("no memory of it")
    assert storage.probably_has(addresses(2)) == [None, None]
    assert storage.close()


# -- events


def test_events_name_keys_that_a_silent_backend_stores_and_removes() -> None:
    backend = Quiet()
    storage = Storage(FINGERPRINT, backend)
    places = addresses(3)
    events = storage.events()
    assert storage.events() is events
    assert events.take() == [StoreEvent(Change.CLEARED)]
    stored(storage, places[:2], SIZE)
    settled(storage.remove(places))
    stored(storage, places[2:], SIZE)
    backend.stored[places[2].key] = b"x" * 256, bytes(SIZE)
    assert fetched(storage, places[2:], SIZE) == [Status.CORRUPT]
    keys = [place.key for place in places]
    put, gone = Change.STORED, Change.REMOVED
    assert events.take(3) == [(put, keys[0]), (put, keys[1]), (gone, keys[0])]
    assert events.take() == [(gone, keys[1]), (put, keys[2]), (gone, keys[2])]
    settled(storage.clear())
    assert events.take() == [(Change.CLEARED, b"")]
    assert storage.close()


def test_another_store_begins_with_everything_gone() -> None:
    storage = Storage(FINGERPRINT)
    events = storage.events()
    storage.attach(MemoryBackend())
    stored(storage, addresses(1), SIZE)
    assert storage.detach().wait(LONGEST_S)
    storage.attach(MemoryBackend())
    assert events.take() == [StoreEvent(Change.CLEARED)], "the old store's are of no use any more"
    stored(storage, addresses(1), SIZE)
    assert [each.change for each in events.take()] == [Change.STORED]
    assert storage.close()


def test_events_that_are_not_taken_are_dropped_counted_and_announced() -> None:
    events = EventLog(limit=2)
    keys = [bytes([number]) for number in range(5)]
    events.add(Change.STORED, keys)
    assert events.n_lost == 3
    assert events.take(1) == [(Change.LOST, b""), (Change.STORED, keys[3])]
    assert events.take() == [(Change.STORED, keys[4])]
    assert events.take() == []


# -- registered memory


class Remote(Quiet):
    """Sends from registered memory; anything else is copied first."""

    def __init__(self) -> None:
        super().__init__()
        self.known: list[memoryview] = []
        self.sent: list[bool] = []
        self.fault: Exception | None = None

    @property
    def capabilities(self) -> Capabilities:
        return super().capabilities._replace(registers=True)

    def register(self, memory: memoryview) -> None:
        if self.fault is not None:
            raise self.fault
        self.known.append(memory)

    def unregister(self, memory: memoryview) -> None:
        self.known.remove(memory)

    def set_from(self, keys, values, deadline_s):  # type: ignore[no-untyped-def]
        pools = [pool.obj for pool in self.known]
        self.sent += [
            any(part.obj is pool for pool in pools for part in each.parts) for each in values
        ]
        return super().set_from(keys, values, deadline_s)


def test_registered_memory_is_stored_from_where_it_is() -> None:
    backend, pool = Remote(), bytearray(4 * SIZE)
    storage = Storage(FINGERPRINT, backend)
    place, other, third, fourth = addresses(4)
    rows = [memoryview(pool)[n * SIZE : (n + 1) * SIZE] for n in range(4)]
    for row, each in zip(rows, addresses(4)):
        row[:] = payload(each, SIZE)
    assert settled(storage.set([place], [rows[0]])) == [OK]
    registered = storage.register(pool)
    settled(registered)
    assert registered.value is True
    outside = payload(third, SIZE)
    assert settled(storage.set([other, third], [rows[1], outside])) == [OK, OK]
    settled(storage.unregister(pool))
    assert backend.known == []
    assert settled(storage.set([fourth], [rows[3]])) == [OK]
    assert backend.sent == [False, True, False, False]
    assert fetched(storage, addresses(4), SIZE) == [OK] * 4
    with pytest.raises(ConfigError, match=r"12000 bytes at 0x\w+ are not registered"):
        storage.unregister(pool)
    assert storage.close()


def test_memory_that_cannot_be_registered_is_copied_and_the_store_is_used() -> None:
    backend, pool = Remote(), bytearray(SIZE)
    backend.fault = OSError("no more memory")
    storage = Storage(FINGERPRINT, backend, SupervisionLimits(failure_limit=1))
    (place,) = addresses(1)
    registered = storage.register(pool)
    settled(registered)
    assert registered.value is False
    assert registered.error == "register: OSError: no more memory"
    pool[:] = payload(place, SIZE)
    assert settled(storage.set([place], [pool])) == [OK]
    assert backend.sent == [False]
    backend.fault = None
    assert storage.detach().wait(LONGEST_S)
    again = Remote()
    storage.attach(again)
    until(lambda: again.known)
    assert storage.close()
