"""Clauses about payloads in parts, hints of presence, and events."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft_storage import Address, Change, EventLog, Status
from kvgraft_testing.storage.clause import storage_clause
from kvgraft_testing.storage.subject import StorageSubject

__all__ = ["events_replay", "payload_in_parts", "presence_hints"]

OK = Status.OK
PARTS = ((4096, 4096), (1, 4095, 904), (4096, 100, 8092), (5000,))
"""Lengths of the parts of some payloads: with and without whole blocks."""

SIZE = 6000
LARGEST = 8 << 20
"""Stores beyond this size are not filled."""


@storage_clause("S9", "A payload in parts is one payload, for any parts it is read in.")
def payload_in_parts(subject: StorageSubject) -> None:
    sizes = [sum(parts) for parts in PARTS]
    addresses, payloads = subject.addresses(len(PARTS)), subject.payloads(sizes)
    with subject.store() as store, subject.supervised(store) as storage:
        source = [_cut(payload, parts) for payload, parts in zip(payloads, PARTS)]
        told = storage.set(addresses, source)
        subject.expect(told.wait(subject.deadline_s + 1), "S10", "set of parts did not end")
        subject.expect_statuses("S9", "set of parts", _known(told.statuses), [OK] * len(PARTS))
        whole, found = subject.get(storage, addresses, sizes)
        subject.expect_statuses("S9", "get of a payload set in parts", whole, [OK] * len(PARTS))
        subject.expect(found == payloads, "S9", "a payload set in parts came back changed")
        for cuts in (PARTS, [(size - 1, 1) for size in sizes]):
            into = [[bytearray(each) for each in parts] for parts in cuts]
            ticket = storage.get(addresses, into)
            subject.expect(ticket.wait(subject.deadline_s + 1), "S10", "get of parts did not end")
            subject.expect_statuses("S9", "get in parts", _known(ticket.statuses), [OK] * len(cuts))
            joined = [b"".join(parts) for parts in into]
            subject.expect(joined == payloads, "S9", "a payload read in parts came back changed")


@storage_clause(
    "S8", "A hint of presence is True, False or None, and never True for a removed key."
)
def presence_hints(subject: StorageSubject) -> None:
    addresses, payloads = subject.addresses(4), subject.payloads([SIZE] * 4)
    keys = [address.key for address in addresses]
    with subject.store() as store, subject.supervised(store) as storage:
        subject.set(storage, addresses, payloads)
        for what in ("set", "remove"):
            hints = list(store.probably_has(keys))
            subject.expect(
                len(hints) == 4, "S8", f"probably_has says {len(hints)} of 4 after {what}"
            )
            strange = [each for each in hints if each not in (True, False, None)]
            subject.expect(not strange, "S8", f"probably_has says {strange[:1]} after {what}")
            wrong = what == "set" and False in hints
            subject.expect(not wrong, "S8", "probably_has says that a key just stored is not there")
            store.remove(keys)
        subject.expect(True not in hints, "S8", "probably_has says that a removed key is there")


@storage_clause("S8", "Replaying a store's events gives the keys that are there.", "events")
def events_replay(subject: StorageSubject) -> None:
    with subject.store() as store, subject.supervised(store) as storage:
        limit = store.stats().capacity_nbytes
        n = 12 if limit is None or limit > LARGEST else min(240, 2 * limit // SIZE)
        size = SIZE if limit is None or limit > LARGEST else max(SIZE, 2 * limit // n)
        events = EventLog()
        store.observe(events)
        addresses = subject.addresses(n)
        payload = subject.payloads([size])
        for address in addresses:
            subject.set(storage, [address], payload)
        store.remove([addresses[-1].key, addresses[0].key])
        _expect_replayed(subject, store.exists([each.key for each in addresses]), events, addresses)
        store.clear()
        left = events.take()
        subject.expect(
            [each.change for each in left] == [Change.CLEARED], "S8", f"clear logs {left[:3]}"
        )


def _expect_replayed(
    subject: StorageSubject,
    there: Sequence[bool],
    events: EventLog,
    addresses: Sequence[Address],
) -> None:
    mirror: set[bytes] = set()
    for change, key in events.take():
        if change is Change.STORED:
            subject.expect(key not in mirror, "S8", "a key is logged as stored twice")
            mirror.add(key)
        elif change in (Change.EVICTED, Change.REMOVED):
            subject.expect(key in mirror, "S8", "a key is logged as gone that was not there")
            mirror.discard(key)
    wrong = sum((address.key in mirror) != hint for address, hint in zip(addresses, there))
    subject.expect(not wrong, "S8", f"events replayed differ from exists in {wrong} keys")


def _cut(payload: bytes, parts: tuple[int, ...]) -> list[bytes]:
    ends = [sum(parts[: number + 1]) for number in range(len(parts))]
    return [payload[end - part : end] for end, part in zip(ends, parts)]


def _known(statuses: list[Status | None]) -> list[Status]:
    return [status for status in statuses if status is not None]
