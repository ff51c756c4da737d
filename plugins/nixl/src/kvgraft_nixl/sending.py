"""A cache's offers to others: pins that last until the receiver is done, with a bound.

    offer ─► offered ─► pull ─► digests computed ─► sent ─────────────► release
                │                                                 │        │
                └── time is up, the namespace was cleared, the cache closes ┴─► pins released

A request that is begun and never admitted holds the pins. It takes no slot and has no promise.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvgraft import Cache, ConfigError, Request, TokenKey, TransferError
from kvgraft.transfers import Fence
from kvgraft_nixl.memory import CacheMemory, Payload
from kvgraft_nixl.messages import Ask, Digests, Offer, Pull, Sources, Withdrawn, encode
from kvgraft_nixl.transport import Transport
from kvgraft_storage import Fingerprint, PageChain

__all__ = ["Sending", "SendingStats", "Shared", "name_of"]


@dataclass
class SendingStats:
    """Counts of offers since the cache's hand-over was opened.

    Attributes:
        offered: offers made.
        refused: offers not made, because too many are held already.
        released: offers that their receivers released.
        expired: offers whose time was over.
        withdrawn: offers whose namespace was cleared.
        pulled: times that an offer's digests were asked for.
    """

    offered: int = 0
    refused: int = 0
    released: int = 0
    expired: int = 0
    withdrawn: int = 0
    pulled: int = 0


@dataclass
class _Held:
    """One offer's pins, and the receivers that wait for its digests."""

    offer: Offer
    lease: Request
    fence: Fence | None
    until: float
    asked: dict[str, Pull] = field(default_factory=dict)
    """By peer, the pulls that wait for an answer."""
    jobs: dict[int, Future[dict[Payload, bytes]]] = field(default_factory=dict)
    """Digests from a page on, by that page."""
    due: dict[str, int] = field(default_factory=dict)
    """By peer, the page from which on it waits for digests."""
    peers: set[str] = field(default_factory=set)


def name_of(fingerprint: Fingerprint, key: TokenKey, n_pages: int) -> bytes:
    """The hash of a key's first pages, by which both sides know that they mean the same (S8)."""
    chain = PageChain(fingerprint, key.namespace)
    chain.grow(key.data[: n_pages * fingerprint.page_size * 4])
    return chain.page(n_pages - 1)


class Shared(NamedTuple):
    """The parts of one hand-over that both its sides use.

    Attributes:
        cache: whose requests.
        memory: its pools.
        fingerprint: of its model and layout.
        transport: reads, and carries messages.
        workers: compute digests.
        clock: monotonic, in seconds.
    """

    cache: Cache
    memory: CacheMemory
    fingerprint: Fingerprint
    transport: Transport
    workers: Executor
    clock: Callable[[], float]


class Sending:
    """The offers of one cache.

    Args:
        shared: the parts of the hand-over.
        hold_s: time for which an offer's pins are held, and once more when it is pulled.
        max_offers: most offers held at a time.
    """

    def __init__(self, shared: Shared, hold_s: float, max_offers: int) -> None:
        self.stats = SendingStats()
        self._cache = shared.cache
        self._memory = shared.memory
        self._fingerprint = shared.fingerprint
        self._transport = shared.transport
        self._workers = shared.workers
        self._clock = shared.clock
        self._hold_s = hold_s
        self._max_offers = max_offers
        self._held: dict[str, _Held] = {}
        self._planes = {name: self._memory.planes(name) for name in self._memory.components}

    def __len__(self) -> int:
        return len(self._held)

    def offer(self, key: TokenKey, reply_to: str = "") -> Offer | None:
        """Pin what is cached of a key, and offer it; None if there is nothing or no room for it."""
        if len(self._held) >= self._max_offers:
            self.stats.refused += 1
            return None
        behind = copy(key)
        behind.extend([0])  # a match leaves a token to compute, and all of these are cached
        lease = self._cache.begin(behind)
        boundary = lease.anchor_tokens // self._memory.page_size
        if not boundary:
            self._cache.abort(lease)
            return None
        try:
            name = name_of(self._fingerprint, key, boundary)
        except ConfigError:  # a namespace that has no name in other processes
            self._cache.abort(lease)
            raise
        fence = self._cache.journal.fence
        if fence is not None and fence.wait(0.0) is not False:
            fence = None
        offer = Offer(
            number=secrets.token_hex(16),
            n_tokens=lease.anchor_tokens,
            name=name,
            fingerprint=self._fingerprint.digest,
            address=self._transport.address,
            slots={} if fence is not None else self._memory.slots(lease, 0, boundary),
            planes={} if fence is not None else self._planes,
            reply_to=reply_to,
        )
        until = self._clock() + self._hold_s
        self._held[offer.number] = _Held(offer, lease, fence, until)
        self.stats.offered += 1
        return offer

    def answer(self, ask: Ask) -> None:
        """Answer the question of another cache, with an offer of nothing where there is none."""
        with suppress(TransferError, ConfigError):
            peer = self._transport.connect(ask.address)
            tokens = np.frombuffer(ask.tokens, "<i4").astype(np.int32)
            made = self.offer(TokenKey(tokens, ask.namespace), ask.number)
            nothing = Offer("", 0, b"", self._fingerprint.digest, b"", reply_to=ask.number)
            self._transport.send(peer, encode(made or nothing))

    def pull(self, pull: Pull) -> None:
        """A receiver reads an offer's data: it is told the digests, and what the offer lacks.

        One that asks again is answered again: the answer may be lost.
        """
        held = self._held.get(pull.number)
        with suppress(TransferError):
            peer = self._transport.connect(pull.address)
            if held is None:
                gone = Withdrawn(pull.number, "the sender holds no such offer any more")
                self._transport.send(peer, encode(gone))
                return
            if not held.peers:
                held.until = self._clock() + self._hold_s
            held.peers.add(peer)
            held.asked[peer] = pull

    def release(self, number: str) -> bool:
        """Release an offer's pins; whether it was held."""
        held = self._held.pop(number, None)
        if held is None:
            return False
        self._cache.abort(held.lease)
        return True

    def poll(self) -> None:
        """Answer pulls, send digests that are computed, and release what is over."""
        now = self._clock()
        for held in [*self._held.values()]:
            if self._cache.tree.is_cleared(held.lease.root):
                self._withdraw(held, "its namespace was cleared")
                self.stats.withdrawn += 1
            elif held.until <= now:
                self._withdraw(held, f"it was not released in {self._hold_s} s")
                self.stats.expired += 1
            else:
                self._answer_pulls(held)
                self._send_digests(held)

    def close(self) -> None:
        """Release all offers."""
        for held in [*self._held.values()]:
            self._withdraw(held, "the sender closes")

    # -- inside

    def _answer_pulls(self, held: _Held) -> None:
        if not held.asked or (held.fence is not None and held.fence.wait(0.0) is False):
            return
        held.fence = None
        boundary = held.offer.n_tokens // self._memory.page_size
        asked, held.asked = held.asked, {}
        for peer, pull in asked.items():
            first = min(pull.first, boundary)
            if first not in held.jobs:
                slots = self._memory.slots(held.lease, first, boundary)
                held.jobs[first] = self._workers.submit(self._memory.digests, slots)
            held.due[peer] = first
            self.stats.pulled += 1
            if not held.offer.slots:
                slots = self._memory.slots(held.lease, 0, boundary)
                with suppress(TransferError):
                    self._transport.send(peer, encode(Sources(pull.number, slots, self._planes)))

    def _send_digests(self, held: _Held) -> None:
        for peer, first in [*held.due.items()]:
            if held.jobs[first].done():
                del held.due[peer]
                digests = held.jobs[first].result()
                with suppress(TransferError):
                    self._transport.send(peer, encode(Digests(held.offer.number, digests)))

    def _withdraw(self, held: _Held, reason: str) -> None:
        """Release an offer's pins and tell its receivers."""
        number = held.offer.number
        for peer in held.peers:
            with suppress(TransferError):
                self._transport.send(peer, encode(Withdrawn(number, reason)))
        self.release(number)
