"""Addresses, payloads and supervised stores for the tests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvgraft.storage import (
    Address,
    Fingerprint,
    PageChain,
    Status,
    Storage,
    StorageBackend,
    StorageTicket,
    SupervisionLimits,
    open_storage,
)

__all__ = [
    "FINGERPRINT",
    "addresses",
    "fetched",
    "opened",
    "payload",
    "settled",
    "stored",
    "supervised",
]

PAGE_SIZE = 4
FINGERPRINT = Fingerprint("model", "revision", "bf16", PAGE_SIZE, {"a": 1})


def addresses(n: int, first: int = 0) -> list[Address]:
    """Addresses of pages of one long sequence."""
    chain = PageChain(FINGERPRINT)
    chain.grow(random.Random(5).randbytes((first + n) * PAGE_SIZE * 4))
    return [chain.address(first + page, "a") for page in range(n)]


def payload(address: Address, nbytes: int) -> bytes:
    """What belongs at an address: equal keys mean equal data."""
    return random.Random(address.key).randbytes(nbytes)


@contextmanager
def opened(url: str) -> Iterator[StorageBackend]:
    """An empty store, closed afterwards."""
    store = open_storage(url)
    try:
        store.clear()
        yield store
    finally:
        store.close()


@contextmanager
def supervised(url: str, limits: SupervisionLimits | None = None) -> Iterator[Storage]:
    """An empty store behind supervision."""
    store = open_storage(url)
    store.clear()
    storage = Storage(FINGERPRINT, store, limits)
    try:
        yield storage
    finally:
        assert storage.close()


def settled(ticket: StorageTicket) -> list[Status | None]:
    """A ticket's statuses once it is done."""
    assert ticket.wait(20)
    return ticket.statuses


def stored(storage: Storage, places: Sequence[Address], nbytes: int) -> list[Status | None]:
    """Store what belongs there."""
    return settled(storage.set(places, [payload(each, nbytes) for each in places]))


def fetched(storage: Storage, places: Sequence[Address], nbytes: int) -> list[Status | None]:
    """Fetch; what is OK must be what belongs there."""
    buffers = [bytearray(nbytes) for _ in places]
    told = settled(storage.get(places, buffers))
    for place, buffer, status in zip(places, buffers, told):
        if status is Status.OK:
            assert buffer == payload(place, nbytes), "wrong bytes were handed out"
    return told
