"""Traffic for a backend's own tests: payloads that are known from their address.

So a test can tell whether a returned payload is right, no matter who stored it and when.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvgraft_storage import (
    Address,
    Fingerprint,
    PageChain,
    Status,
    Storage,
    StorageBackend,
    StorageTicket,
    SupervisionLimits,
    Value,
    open_storage,
)
from kvgraft_storage.payload import HEADER_NBYTES, encode_header

__all__ = [
    "FINGERPRINT",
    "addresses",
    "fetched",
    "opened",
    "payload",
    "record",
    "room",
    "settled",
    "stored",
    "supervised",
    "until",
]

PAGE_SIZE = 4
TOKEN_NBYTES = 4
FINGERPRINT = Fingerprint("model", "revision", "bf16", PAGE_SIZE, {"a": 1})
"""The fingerprint of the addresses and stores here; its one component is `"a"`."""

LONGEST_S = 30.0
"""Seconds that a busy machine may need; a test that waits this long fails."""


def addresses(n: int, first: int = 0, fingerprint: Fingerprint = FINGERPRINT) -> list[Address]:
    """Addresses of `n` pages of one long sequence, from page `first` on; always the same."""
    chain = PageChain(fingerprint)
    chain.grow(random.Random(5).randbytes((first + n) * PAGE_SIZE * TOKEN_NBYTES))
    return [chain.address(first + page, "a") for page in range(n)]


def payload(address: Address, nbytes: int) -> bytes:
    """The payload of an address: equal keys mean equal data."""
    return random.Random(address.key).randbytes(nbytes)


def record(address: Address, nbytes: int) -> bytes:
    """The header and the payload of an address, one after the other."""
    content = payload(address, nbytes)
    return encode_header(address, FINGERPRINT.digest, content) + content


def room(nbytes: int) -> Value:
    """Memory for a value, all zero."""
    return Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(bytearray(nbytes)))


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
    """An empty store behind supervision, closed afterwards.

    Raises:
        AssertionError: it could not be closed in time.
    """
    store = open_storage(url)
    store.clear()
    storage = Storage(FINGERPRINT, store, limits)
    try:
        yield storage
    finally:
        assert storage.close(), f"{url} was not closed in time"


def _deadline_s(storage: Storage) -> float | None:
    """Time for a busy machine; storage with limits of its own keeps to those."""
    return LONGEST_S / 2 if storage.limits == SupervisionLimits() else None


def settled(ticket: StorageTicket) -> list[Status | None]:
    """A ticket's statuses once it is done.

    Raises:
        AssertionError: it does not end.
    """
    assert ticket.wait(LONGEST_S), "the call does not end"
    return ticket.statuses


def stored(storage: Storage, places: Sequence[Address], nbytes: int) -> list[Status | None]:
    """Store the payload that belongs to each address; a status per address."""
    payloads = [payload(each, nbytes) for each in places]
    return settled(storage.set(places, payloads, _deadline_s(storage)))


def fetched(storage: Storage, places: Sequence[Address], nbytes: int) -> list[Status | None]:
    """Fetch; a status per address.

    Raises:
        AssertionError: a payload with status OK is the wrong one.
    """
    buffers = [bytearray(nbytes) for _ in places]
    told = settled(storage.get(places, buffers, _deadline_s(storage)))
    for place, buffer, status in zip(places, buffers, told):
        if status is Status.OK:
            assert buffer == payload(place, nbytes), "wrong bytes were handed out"
    return told


def until(condition: Callable[[], object], timeout_s: float = LONGEST_S) -> None:
    """Wait for an effect of another thread or process.

    Raises:
        AssertionError: it did not happen.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)
