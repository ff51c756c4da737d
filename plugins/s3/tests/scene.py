"""Addresses, payloads, values, and waiting for what others do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from kvgraft.storage import Address, Fingerprint, PageChain, Status, Storage, StorageTicket, Value
from kvgraft.storage.payload import HEADER_NBYTES, encode_header

__all__ = [
    "FINGERPRINT",
    "addresses",
    "fetched",
    "payload",
    "record",
    "room",
    "settled",
    "stored",
    "until",
]

FINGERPRINT = Fingerprint("model", "revision", "bf16", 4, {"a": 1})


def addresses(n: int, first: int = 0) -> list[Address]:
    """Addresses of pages of one long sequence."""
    chain = PageChain(FINGERPRINT)
    chain.grow(random.Random(5).randbytes((first + n) * 4 * 4))
    return [chain.address(first + page, "a") for page in range(n)]


def payload(address: Address, nbytes: int) -> bytes:
    """What belongs at an address: equal keys mean equal data."""
    return random.Random(address.key).randbytes(nbytes)


def record(address: Address, nbytes: int) -> bytes:
    """The object that belongs at an address."""
    content = payload(address, nbytes)
    return encode_header(address, FINGERPRINT.digest, content) + content


def room(nbytes: int) -> Value:
    """Memory for a value."""
    return Value(memoryview(bytearray(HEADER_NBYTES)), memoryview(bytearray(nbytes)))


def settled(ticket: StorageTicket) -> list[Status | None]:
    """A ticket's statuses once it is done."""
    assert ticket.wait(30)
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


def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for what another thread or process does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
