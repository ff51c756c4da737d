"""Clauses about data that stays or is removed, and about a store's own counts."""

from __future__ import annotations

import time

from kvgraft.errors import ConfigError
from kvgraft_storage import Status, Storage, StorageBackend
from kvgraft_testing.storage.clause import storage_clause
from kvgraft_testing.storage.subject import StorageSubject

__all__ = [
    "capacity",
    "chain_heads",
    "closing",
    "components_apart",
    "durable",
    "pinning",
    "remove_and_clear",
    "shared",
    "stats_and_verify",
    "too_large",
    "touching",
    "touching_keeps_data",
]

OK, MISS = Status.OK, Status.MISS
SIZE = 6000
LARGEST = 64 << 20
"""Stores beyond this size are not filled."""

PAUSE_S = 0.02
"""Seconds between two checks for the effects of another opener."""


@storage_clause("S8", "Removed and cleared keys are gone, and no others.")
def remove_and_clear(subject: StorageSubject) -> None:
    addresses, payloads = subject.addresses(6), subject.payloads([SIZE] * 6)
    with subject.store() as store, subject.supervised(store) as storage:
        subject.set(storage, addresses, payloads)
        told = list(store.remove([address.key for address in addresses[:2]]))
        subject.expect_statuses("S8", "remove", told, [OK] * 2)
        told, _ = subject.get(storage, addresses, [SIZE] * 6)
        subject.expect_statuses("S8", "get after remove of two", told, [MISS] * 2 + [OK] * 4)
        subject.expect_statuses(
            "S8", "set of removed keys", subject.set(storage, addresses, payloads), [OK] * 6
        )
        told, found = subject.get(storage, addresses, [SIZE] * 6)
        subject.expect_statuses("S8", "get of keys stored anew", told, [OK] * 6)
        subject.expect(found == payloads, "S9", "data stored anew came back changed")
        store.clear()
        told, _ = subject.get(storage, addresses, [SIZE] * 6)
        subject.expect_statuses("S8", "get after clear", told, [MISS] * 6)
        hints = list(store.exists([address.key for address in addresses]))
        subject.expect(not any(hints), "S8", "exists after clear says that something is there")


@storage_clause("S8", "Components of one page are kept apart.")
def components_apart(subject: StorageSubject) -> None:
    a, b = subject.addresses(4, "a"), subject.addresses(4, "b")
    payloads = subject.payloads([SIZE] * 4)
    with subject.store() as store, subject.supervised(store) as storage:
        subject.set(storage, a, payloads)
        told, _ = subject.get(storage, b, [SIZE] * 4)
        subject.expect_statuses("S8", "get of another component", told, [MISS] * 4)


@storage_clause("S9", "A store counts its content, and finds no fault in it.")
def stats_and_verify(subject: StorageSubject) -> None:
    addresses, payloads = subject.addresses(8), subject.payloads([SIZE] * 8)
    with subject.store() as store, subject.supervised(store) as storage:
        empty = store.stats()
        subject.set(storage, addresses, payloads)
        full, report = store.stats(), store.verify()
        added = full.n_records - empty.n_records
        subject.expect(added == 8, "S9", f"8 payloads were stored, stats counts {added}")
        subject.expect(full.nbytes >= 8 * SIZE, "S9", f"8 x {SIZE} bytes take {full.nbytes}")
        subject.expect(report.n_records == 8, "S9", f"verify read {report.n_records} of 8")
        subject.expect(not report.damaged, "S9", f"verify finds damage: {report.damaged[:1]}")


@storage_clause("S10", "A store keeps to its capacity, by eviction or by FULL.")
def capacity(subject: StorageSubject) -> None:
    with subject.store() as store, subject.supervised(store) as storage:
        limit = store.stats().capacity_nbytes
        if limit is None or limit > LARGEST:
            return
        n = min(240, 2 * limit // SIZE)
        size = max(SIZE, 2 * limit // n)
        payloads = subject.payloads([size] * 4)
        told: list[Status] = []
        for first in range(0, n, 4):
            told += subject.set(storage, subject.addresses(4, first=first), payloads)
            used = store.stats().nbytes
            subject.expect(used <= limit, "S10", f"{used} bytes in a store of {limit}")
        allowed = {OK} if subject.capabilities.evicts else {OK, Status.FULL}
        strange = sorted(set(told) - allowed)
        subject.expect(not strange, "S10", f"a store that is full answers {strange}")
        subject.expect(told[0] is OK, "S10", "nothing fits into an empty store")


CHAIN_PAGES = 12
FILLED_WITH = 60
"""Payloads of one size that fill a store; it is offered twice as many."""


def _size_that_fills(subject: StorageSubject, store: StorageBackend) -> int | None:
    """A payload of which about `FILLED_WITH` fit; None where the store is too large to fill."""
    limit = store.stats().capacity_nbytes
    if not subject.capabilities.evicts or limit is None or limit > LARGEST:
        return None
    size = max(SIZE, limit // FILLED_WITH)
    longest = subject.capabilities.max_payload_nbytes
    return size if longest is None else min(size, longest)


@storage_clause("S11", "A touch changes no data, of keys that are there or not.", "touch")
def touching_keeps_data(subject: StorageSubject) -> None:
    addresses, payloads = subject.addresses(4), subject.payloads([SIZE] * 3)
    with subject.store() as store, subject.supervised(store) as storage:
        subject.set(storage, addresses[:3], payloads)
        store.touch([address.key for address in reversed(addresses)])
        told, found = subject.get(storage, addresses, [SIZE] * 4)
        subject.expect_statuses("S11", "get after touch", told, [OK] * 3 + [MISS])
        subject.expect(found[:3] == payloads, "S9", "data that was touched came back changed")


@storage_clause("S11", "Keys that are touched outlive keys that are not.", "lru")
def touching(subject: StorageSubject) -> None:
    with subject.store() as store, subject.supervised(store) as storage:
        size = _size_that_fills(subject, store)
        if size is None:
            return
        payload = subject.payloads([size])
        kept, left = subject.addresses(4), subject.addresses(4, first=4)
        for address in [*kept, *left]:
            subject.set(storage, [address], payload)
        for number in range(2 * FILLED_WITH):
            subject.set(storage, subject.addresses(1, "b", number), payload)
            storage.touch(kept).wait(subject.deadline_s)
        told, _ = subject.get(storage, left, [size] * 4)
        subject.expect(MISS in told, "S10", "a store that is full twice over has evicted nothing")
        told, _ = subject.get(storage, kept, [size] * 4)
        subject.expect_statuses("S11", "get of keys that were touched", told, [OK] * 4)


@storage_clause("S11", "A chain that is stored in order is evicted from its end.", "lru")
def chain_heads(subject: StorageSubject) -> None:
    with subject.store() as store, subject.supervised(store) as storage:
        size = _size_that_fills(subject, store)
        if size is None:
            return
        chain = subject.addresses(CHAIN_PAGES)
        subject.set(storage, chain, subject.payloads([size] * CHAIN_PAGES))
        payload = subject.payloads([size])
        most = n_evicted = number = 0
        while n_evicted < CHAIN_PAGES // 2 and number < 2 * FILLED_WITH:
            subject.set(storage, subject.addresses(1, "b", number), payload)
            n_records = store.stats().n_records
            n_evicted += n_records <= most
            most = max(most, n_records)
            number += 1
        keys = [address.key for address in chain]
        hints = list(store.exists(keys))
        head = hints.index(False) if False in hints else len(hints)
        subject.expect(
            not any(hints[head:]),
            "S11",
            f"of a chain of {len(hints)} pages number {head} is gone and a later one is there",
        )


@storage_clause("S9", "A payload that is too long is refused, and its neighbours are stored.")
def too_large(subject: StorageSubject) -> None:
    longest = subject.capabilities.max_payload_nbytes
    if longest is None or longest > LARGEST:
        return
    addresses = subject.addresses(3)
    sizes = [SIZE, longest + 1, SIZE]
    wanted = [OK, Status.TOO_LARGE, OK]
    with subject.store() as store, subject.supervised(store) as storage:
        told = subject.set(storage, addresses, subject.payloads(sizes))
        subject.expect_statuses("S9", "set of one that is too long", told, wanted)
        told, _ = subject.get(storage, addresses, sizes)
        subject.expect_statuses("S9", "get of one that was too long", told, [OK, MISS, OK])


@storage_clause("S9", "Flushed data is there when the store is opened again.", "durable")
def durable(subject: StorageSubject) -> None:
    addresses, payloads = subject.addresses(8), subject.payloads([SIZE] * 8)
    with subject.place() as directory:
        store = subject.opener(directory)
        store.clear()
        with subject.supervised(store) as storage:
            subject.set(storage, addresses, payloads)
            flushed = storage.flush()
            flushed.wait(subject.deadline_s + 1)
            subject.expect(flushed.value is True, "S9", f"flush failed: {flushed.error}")
            if subject.capabilities.shared:  # as after a kill: the first one is not closed
                _expect_there(subject, directory, "while the first is open")
        _expect_there(subject, directory, "after it was closed")


def _expect_there(subject: StorageSubject, directory: object, when: str) -> None:
    addresses, payloads = subject.addresses(8), subject.payloads([SIZE] * 8)
    again = subject.opener(directory)  # type: ignore[arg-type]
    with subject.supervised(again) as storage:
        told, found = subject.get(storage, addresses, [SIZE] * 8)
    subject.expect_statuses("S9", f"get from the store opened again {when}", told, [OK] * 8)
    subject.expect(found == payloads, "S9", f"a payload changed, opened again {when}")


@storage_clause(
    "S8", "A version of a namespace outlives clearing, and reaches who opens the store."
)
def versions(subject: StorageSubject) -> None:
    name, other, version = bytes(32), bytes([1]) * 32, bytes(range(32))
    with subject.place() as directory:
        store = subject.opener(directory)
        try:
            store.set_version(name, version[::-1])
        except ConfigError:
            claims = store.capabilities.keeps_versions
            store.close()
            subject.expect(not claims, "S8", "claims to keep versions, and refuses")
            return
        store.set_version(other, version[::-1])
        store.set_version(name, version)
        store.clear()
        wanted = {name: version, other: version[::-1]}
        told = {key: store.versions().get(key) for key in wanted}
        subject.expect(store.capabilities.keeps_versions, "S8", "keeps versions, does not claim to")
        subject.expect(
            told == wanted, "S8", "a version changed, or went when the store was cleared"
        )
        if subject.capabilities.durable:  # as after a kill: the first one is not closed
            again = subject.opener(directory)
            found = {key: again.versions().get(key) for key in wanted}
            again.close()
            subject.expect(found == wanted, "S8", "opened again, the store has other versions")
        store.close()


@storage_clause("S8", "Two openers of one store see each other's writes and removals.", "shared")
def shared(subject: StorageSubject) -> None:
    addresses, payloads = subject.addresses(4), subject.payloads([SIZE] * 4)
    with subject.place() as directory:
        first, second = subject.opener(directory), subject.opener(directory)
        first.clear()
        with subject.supervised(first) as one, subject.supervised(second) as other:
            subject.set(one, addresses, payloads)
            subject.expect(
                _settles(subject, other, OK), "S8", "the other opener does not find a stored key"
            )
            _, found = subject.get(other, addresses, [SIZE] * 4)
            subject.expect(found == payloads, "S9", "the other reads other bytes")
            one.remove(addresses).wait(subject.deadline_s)
            subject.expect(
                _settles(subject, other, MISS), "S8", "the other opener finds a removed key"
            )


def _settles(subject: StorageSubject, storage: Storage, wanted: Status) -> bool:
    """Whether all keys get this status within a second; nothing wrong is seen before."""
    addresses = subject.addresses(4)
    for _ in range(max(2, int(min(1.0, subject.deadline_s) / PAUSE_S))):
        told, _ = subject.get(storage, addresses, [SIZE] * 4)
        subject.expect(set(told) <= {OK, MISS}, "S9", f"a shared store answers {sorted(set(told))}")
        if set(told) == {wanted}:
            return True
        time.sleep(PAUSE_S)
    return False


@storage_clause("S11", "A store is healthy until it is closed; closing it twice is closing it.")
def closing(subject: StorageSubject) -> None:
    with subject.store() as store:
        subject.expect(store.healthy() is True, "S11", "an open store is not healthy")
        subject.expect(
            store.capabilities == subject.capabilities, "S11", "capabilities change between stores"
        )
        store.close()
        store.close()
        subject.expect(store.healthy() is not True, "S11", "a closed store is healthy")


@storage_clause("S11", "A store claims only its capabilities, and pinned keys stay.")
def pinning(subject: StorageSubject) -> None:
    addresses, payloads = subject.addresses(2), subject.payloads([SIZE] * 2)
    keys = [address.key for address in addresses]
    with subject.store() as store, subject.supervised(store) as storage:
        subject.set(storage, addresses, payloads)
        try:
            told = list(store.pin(keys))
        except ConfigError:
            subject.expect(not subject.capabilities.pin, "S11", "claims to pin, and refuses")
            return
        subject.expect(subject.capabilities.pin, "S11", "pins, and does not claim to")
        subject.expect_statuses("S11", "pin", told, [OK] * 2)
        store.unpin(keys)
