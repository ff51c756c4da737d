"""Addresses, payloads and stores for the tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from kvgraft.storage import Address, Fingerprint, PageChain, Status, Storage, StorageTicket

__all__ = [
    "FINGERPRINT",
    "Clock",
    "addresses",
    "fetched",
    "payload",
    "settled",
    "stored",
    "until",
]

PAGE_SIZE = 4
FINGERPRINT = Fingerprint("model", "revision", "bf16", PAGE_SIZE, {"a": 1})


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def addresses(n: int, first: int = 0, fingerprint: Fingerprint = FINGERPRINT) -> list[Address]:
    """Addresses of pages of one long sequence."""
    chain = PageChain(fingerprint)
    chain.grow(random.Random(5).randbytes((first + n) * PAGE_SIZE * 4))
    return [chain.address(first + page, "a") for page in range(n)]


def payload(address: Address, nbytes: int) -> bytes:
    """What belongs at an address: equal keys mean equal data."""
    return random.Random(address.key).randbytes(nbytes)


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


def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Wait for what another thread does."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.001)
