"""Clauses about bytes and statuses."""

from __future__ import annotations

import random
import threading

from kvgraft_storage import Status, Value
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_testing.storage.clause import storage_clause
from kvgraft_testing.storage.subject import StorageSubject

__all__ = [
    "any_key",
    "order_of_statuses",
    "passed_deadline",
    "round_trip",
    "several_threads",
    "stays_inside",
    "stored_again",
    "wrong_length",
]

SIZES = (1, 255, 4095, 4096, 4097, 8192, 50_000)
OK, MISS = Status.OK, Status.MISS
GUARD = 64


@storage_clause("S9", "Stored data comes back whole, at any length.")
def round_trip(subject: StorageSubject) -> None:
    addresses, payloads = subject.addresses(len(SIZES)), subject.payloads(SIZES)
    with subject.store() as store, subject.supervised(store) as storage:
        subject.expect_statuses(
            "S9", "set", subject.set(storage, addresses, payloads), [OK] * len(SIZES)
        )
        for _ in range(2):
            told, found = subject.get(storage, addresses, SIZES)
            subject.expect_statuses("S9", "get after set", told, [OK] * len(SIZES))
            subject.expect(found == payloads, "S9", "a payload came back changed")


@storage_clause("S9", "Statuses stand in the order of the keys.")
def order_of_statuses(subject: StorageSubject) -> None:
    sizes = [3000 + number for number in range(12)]
    addresses, payloads = subject.addresses(12), subject.payloads(sizes)
    there = [number % 3 == 0 for number in range(12)]
    with subject.store() as store, subject.supervised(store) as storage:
        some = [number for number in range(12) if there[number]]
        subject.set(storage, [addresses[i] for i in some], [payloads[i] for i in some])
        wanted = [OK if each else MISS for each in there]
        told, found = subject.get(storage, addresses, sizes)
        subject.expect_statuses("S9", "get of some that are there", told, wanted)
        for number in some:
            subject.expect(found[number] == payloads[number], "S9", f"key {number} has another's")
        hints = list(store.exists([address.key for address in addresses]))
        subject.expect(hints == there, "S9", f"exists says {hints}, stored are {there}")
        told = list(store.remove([address.key for address in addresses]))
        subject.expect_statuses("S9", "remove of some that are there", told, wanted)


@storage_clause("S9", "A buffer of another length is told so, and never OK.")
def wrong_length(subject: StorageSubject) -> None:
    (address,), (payload,) = subject.addresses(1), subject.payloads([5000])
    with subject.store() as store:
        header = memoryview(bytes(HEADER_NBYTES))
        store.set_from([address.key], [Value(header, memoryview(payload))], subject.deadline_s)
        for size, wanted in ((4999, Status.TOO_LARGE), (100, Status.TOO_LARGE)):
            told = store.get_into([address.key], [_value(size)], subject.deadline_s)
            subject.expect_statuses("S9", f"get of 5000 into {size} bytes", list(told), [wanted])
        for size in (5001, 9000):
            (status,) = store.get_into([address.key], [_value(size)], subject.deadline_s)
            told_ok = status is OK
            subject.expect(not told_ok, "S9", f"get of 5000 into {size} bytes is ok")


@storage_clause("S9", "Memory beside the buffers, and the source of a set, stay as they are.")
def stays_inside(subject: StorageSubject) -> None:
    sizes = [4096, 5000, 1]
    addresses, payloads = subject.addresses(3), subject.payloads(sizes)
    keys = [address.key for address in addresses]
    with subject.store() as store:
        source = [bytearray(payload) for payload in payloads]
        headers = [bytearray(random.Random(3).randbytes(HEADER_NBYTES)) for _ in keys]
        values = [Value(memoryview(h), memoryview(p)) for h, p in zip(headers, source)]
        told = store.set_from(keys, values, subject.deadline_s)
        subject.expect_statuses("S9", "set", list(told), [OK] * 3)
        subject.expect([bytes(each) for each in source] == payloads, "S9", "set changed its source")
        guarded = [bytearray(b"\xa5" * (size + 2 * GUARD)) for size in sizes]
        into = [
            Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(memory)[GUARD:-GUARD])
            for memory in guarded
        ]
        told = store.get_into(keys, into, subject.deadline_s)
        subject.expect_statuses("S9", "get", list(told), [OK] * 3)
        for memory, value, header in zip(guarded, into, headers):
            edges = bytes(memory[:GUARD] + memory[-GUARD:])
            subject.expect(edges == b"\xa5" * 2 * GUARD, "S9", "get wrote beside its buffer")
            subject.expect(value.header == header, "S9", "a header came back changed")


@storage_clause("S9", "A key that is stored again is whole, old or new.")
def stored_again(subject: StorageSubject) -> None:
    addresses = subject.addresses(4)
    old, new = subject.payloads([9000] * 4, 1), subject.payloads([9000] * 4, 2)
    with subject.store() as store, subject.supervised(store) as storage:
        for payloads in (old, new):
            told = subject.set(storage, addresses, payloads)
            subject.expect_statuses("S9", "set", told, [OK] * 4)
        told, found = subject.get(storage, addresses, [9000] * 4)
        subject.expect_statuses("S9", "get of a key stored twice", told, [OK] * 4)
        whole = all(each in pair for each, pair in zip(found, zip(old, new)))
        subject.expect(whole, "S9", "a key stored twice is neither the old nor the new payload")


@storage_clause("S8", "Keys are 32 bytes of any value, and differ in every one of them.")
def any_key(subject: StorageSubject) -> None:
    keys = [bytes(32), b"\xff" * 32, b"\0" * 31 + b"\n", b" " * 32, bytes(range(32))]
    keys += [bytes([1]) + bytes(31), bytes(31) + bytes([1]), b"%s/../{}*?\\" + bytes(21)]
    payloads = subject.payloads([2000] * len(keys))
    headers = [random.Random(number).randbytes(HEADER_NBYTES) for number in range(len(keys))]
    values = [Value(memoryview(h), memoryview(p)) for h, p in zip(headers, payloads)]
    with subject.store() as store:
        told = store.set_from(keys, values, subject.deadline_s)
        subject.expect_statuses("S8", "set", list(told), [OK] * len(keys))
        into = [_value(2000) for _ in keys]
        told = store.get_into(keys, into, subject.deadline_s)
        subject.expect_statuses("S8", "get", list(told), [OK] * len(keys))
        for key, value, payload in zip(keys, into, payloads):
            subject.expect(value.payload == payload, "S8", f"key {key.hex()} has another's payload")


@storage_clause("S6", "A call whose deadline has passed returns at once, a status for each key.")
def passed_deadline(subject: StorageSubject) -> None:
    sizes = [20_000] * 16
    addresses, payloads = subject.addresses(16), subject.payloads(sizes)
    allowed = {OK, MISS, Status.TIMEOUT, Status.FULL}
    with subject.store() as store, subject.supervised(store) as storage:
        keys = [address.key for address in addresses]
        values = [Value(memoryview(bytes(HEADER_NBYTES)), memoryview(each)) for each in payloads]
        for verb, told in (
            ("set", store.set_from(keys, values, 0.0)),
            ("get", store.get_into(keys, [_value(each) for each in sizes], 0.0)),
        ):
            subject.expect(
                len(told) == 16 and set(told) <= allowed,
                "S6",
                f"{verb} with no time left: {len(told)} of 16 statuses, {sorted(set(told))}",
            )
        told, _ = subject.get(storage, addresses[:1], sizes[:1])
        subject.expect(told[0] is not Status.DOWN, "S10", "a deadline that passed took it down")


@storage_clause("S9", "Threads that store and fetch at the same time do not disturb each other.")
def several_threads(subject: StorageSubject) -> None:
    sizes = [2000 + 100 * number for number in range(16)]
    faults: list[str] = []
    raised: list[Exception] = []
    with subject.store() as store, subject.supervised(store) as storage:

        def work(number: int) -> None:
            try:
                store_and_fetch(number)
            except Exception as error:  # noqa: BLE001 - raised again below, not in the thread
                raised.append(error)

        def store_and_fetch(number: int) -> None:
            addresses = subject.addresses(16, first=16 * number)
            payloads = subject.payloads(sizes, number)
            for _ in range(3):
                subject.set(storage, addresses, payloads)
                told, found = subject.get(storage, addresses, sizes)
                if set(told) != {OK} or found != payloads:
                    faults.append(f"thread {number} got {sorted(set(told))}")
                storage.remove(addresses[:4]).wait(subject.deadline_s)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if raised:
        raise raised[0]
    subject.expect(not faults, "S9", "; ".join(faults[:3]))


def _value(nbytes: int) -> Value:
    return Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(bytearray(nbytes)))
