"""Requests that come from other caches.

    accept ─► begin, admit ─► load back ─► allocate ─► read, layer by layer ─► verify ─► publish
                 │ refused        │ failed                  │ a failure of any kind     │
                 └────────────────┴─────────── FAILED ◄─────┘                  READY ◄──┘

The receiver is an engine whose pass of the model is a read: its request is begun, admitted and
allocated as for computing, the bytes are read right into its slots, and then they are computed and
shared. Nobody else sees the slots before. A failed read may go on to write, so its request keeps
the slots until the transport says that it ended.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from typing import Any

from kvgraft import ConfigError, LeaseError, Outcome, Request, Tier, TokenKey, TransferError
from kvgraft_nixl.arrival import Arrival, Stage
from kvgraft_nixl.memory import Payload, Slots, addresses, pieces
from kvgraft_nixl.messages import (
    Ask,
    Digests,
    Offer,
    Pull,
    Release,
    Sources,
    Withdrawn,
    encode,
    plain_namespace,
)
from kvgraft_nixl.sending import Shared, name_of
from kvgraft_nixl.transport import Read, ReadState

__all__ = ["Receiving", "ReceivingStats"]

LAYERS_AT_ONCE = 2
"""Layers that are read at a time, at least: one is on its way while another is verified."""

NBYTES_AT_ONCE = 32 << 20
"""Bytes that are read at a time, if they are more layers."""

ASK_AGAIN_S = 1.0
"""Time after which a sender that has not answered is asked again: so a dead one is noticed."""

FRESH_S = 60.0
"""Time for which a measured bandwidth decides; then one prefix is read to measure anew."""


@dataclass
class ReceivingStats:
    """Counts of arrivals since the cache's hand-over was opened.

    Attributes:
        accepted: requests that were to be taken over, or fetched.
        ready: those whose data all came.
        failed: those that are computed again.
        refused: of the failed ones, those that were not admitted.
        slower: of the failed ones, those that are estimated to be computed faster.
        damaged: of the failed ones, those with a payload that was not the sender's.
        nbytes: bytes that were read and verified.
        bandwidth_bytes_s: of the last arrival; 0 before the first.
    """

    accepted: int = 0
    ready: int = 0
    failed: int = 0
    refused: int = 0
    slower: int = 0
    damaged: int = 0
    nbytes: int = 0
    bandwidth_bytes_s: float = 0.0


class Receiving:
    """The arrivals at one cache.

    Args:
        shared: the parts of the hand-over.
        timeout_s: longest time of an arrival, and for which a ready one waits for its engine.
        max_arrivals: most of them at a time, with those whose failed reads go on.
        advance: polls the hand-over, for callers that wait for a layer.
    """

    def __init__(
        self, shared: Shared, timeout_s: float, max_arrivals: int, advance: Callable[[], None]
    ) -> None:
        self.stats = ReceivingStats()
        self._cache = shared.cache
        self._memory = shared.memory
        self._fingerprint = shared.fingerprint
        self._transport = shared.transport
        self._workers = shared.workers
        self._clock = shared.clock
        self._timeout_s = timeout_s
        self._max_arrivals = max_arrivals
        self._advance = advance
        self._arrivals: dict[str, Arrival] = {}
        """By the number of the offer or the question."""
        self._going_on: list[tuple[Request, list[Read]]] = []
        self._measured_s = 0.0

    def __len__(self) -> int:
        return len(self._arrivals)

    @property
    def n_going_on(self) -> int:
        """Failed arrivals whose reads have not ended: their slots are kept."""
        return len(self._going_on)

    def accept(self, payload: bytes, key: TokenKey, arguments: Mapping[str, Any]) -> Arrival:
        """Take over a request by its offer."""
        arrival = self._new(key, arguments)
        try:
            self._begin(arrival, Offer.read(payload))
        except (ConfigError, LeaseError, TransferError, _Refused) as error:
            self._fail(arrival, error)
            if isinstance(error, ConfigError):
                raise
        return arrival

    def fetch(self, address: bytes, key: TokenKey, arguments: Mapping[str, Any]) -> Arrival:
        """Ask a peer for a prefix, and take it over."""
        if key.identities is not None:
            raise ConfigError(
                "fetch: a key with identities cannot be asked for; compute it, or hand it over"
            )
        namespace = plain_namespace(key.namespace)
        arrival = self._new(key, arguments)
        try:
            peer = self._transport.connect(address)
            ask = Ask(secrets.token_hex(16), key.tokens().astype("<i4").tobytes(), namespace, b"")
            ask = Ask(ask.number, ask.tokens, ask.namespace, self._transport.address)
            self._expect_room()
            self._transport.send(peer, encode(ask))
            self._arrivals[ask.number] = arrival
        except (TransferError, _Refused) as error:
            self._fail(arrival, error)
        return arrival

    def poll(self) -> None:
        """Go on with all arrivals; give up those whose time is over."""
        for number, arrival in [*self._arrivals.items()]:
            try:
                self._go_on(number, arrival)
            except (ConfigError, LeaseError, TransferError, _Refused) as error:
                self._fail(arrival, error)
        for number, arrival in [*self._arrivals.items()]:
            if arrival.stage in (Stage.TAKEN, Stage.FAILED):
                del self._arrivals[number]
        for each in [*self._going_on]:
            request, reads = each
            if all(read.state() is not ReadState.MOVING for read in reads):
                self._going_on.remove(each)
                self._cache.abort(request)

    def heard(self, message: Offer | Sources | Digests | Withdrawn) -> bool:
        """Take in a peer's message; whether an arrival waits for it."""
        number = message.reply_to if isinstance(message, Offer) else message.number
        arrival = self._arrivals.get(number)
        if arrival is None or arrival.ended:
            if isinstance(message, Offer) and message.n_tokens:
                self._decline(message)
            return False
        try:
            self._take_in(number, arrival, message)
        except (ConfigError, LeaseError, TransferError, _Refused) as error:
            self._fail(arrival, error)
        return True

    def give_up(self, arrival: Arrival) -> None:
        """Give up an arrival; one that has ended is left as it is, but for a ready one.

        The offer of a deferred one is released.
        """
        if arrival.stage is Stage.READY:
            self._leave(arrival)
        elif not arrival.ended:
            self._fail(arrival, TransferError("it was given up"))
        elif _is_deferred(arrival):
            self._release(arrival)

    def give_up_all(self) -> None:
        """Give up all arrivals, and tell their senders."""
        for arrival in [*self._arrivals.values()]:
            self.give_up(arrival)
        self._arrivals.clear()

    def close(self) -> None:
        """End failed arrivals: the transport is closed, so no read writes any more."""
        for request, _ in self._going_on:
            self._cache.abort(request)
        self._going_on.clear()

    # -- the life of an arrival

    def _new(self, key: TokenKey, arguments: Mapping[str, Any]) -> Arrival:
        self.stats.accepted += 1
        return Arrival(key, arguments, self._clock() + self._timeout_s, self._advance)

    def _expect_room(self) -> None:
        if len(self._arrivals) + len(self._going_on) >= self._max_arrivals:
            raise _Refused(
                f"{len(self._arrivals)} arrivals and {len(self._going_on)} failed ones whose reads "
                f"go on are at most max_arrivals={self._max_arrivals}"
            )

    def _begin(self, arrival: Arrival, offer: Offer) -> None:
        """Admit the request, before a byte moves."""
        arrival.offer = offer
        size, key = self._memory.page_size, arrival.key
        boundary, rest = divmod(offer.n_tokens, size)
        if offer.fingerprint != self._fingerprint.digest:
            raise _Refused("the offer is of another model or layout")
        if rest or not 0 < offer.n_tokens < key.n_tokens:
            raise _Refused(
                f"the offer has {offer.n_tokens} tokens and the key {key.n_tokens}; at least one "
                "is left to compute"
            )
        if offer.name != name_of(self._fingerprint, key, boundary):
            raise _Refused("the offer is of other tokens or another namespace")
        other = self._arrivals.get(offer.number)
        if other is not None and other.stage not in (Stage.TAKEN, Stage.FAILED):
            raise _Refused("another arrival follows the offer already")
        self._expect_room()
        arrival.peer = self._transport.connect(offer.address)
        arguments = {**arrival.arguments}
        points = arguments.pop("resume_at", None)
        points = [] if points is None else [points] if isinstance(points, int) else [*points]
        request = self._cache.begin(copy(key), resume_at=[*points, offer.n_tokens], **arguments)
        arrival.own, arrival.boundary = request, boundary
        arrival.first = min(boundary, request.anchor_tokens // size)
        arrival.nbytes = (
            self._memory.nbytes(arrival.first, boundary) if self._is_short(arrival) else 0
        )
        self._expect_faster(arrival, request)
        arrival.decision = self._cache.admit(request)
        if not arrival.decision.admitted:
            self.stats.refused += 1
            raise _Refused(f"not admitted: {arrival.decision}")
        self._cache.load_back(request)
        arrival.stage = Stage.LOADING
        self._arrivals[offer.number] = arrival
        self._load(offer.number, arrival)

    def _is_short(self, arrival: Arrival) -> bool:
        return arrival.first < arrival.boundary

    def _expect_faster(self, arrival: Arrival, request: Request) -> None:
        """Refuse a prefix that is estimated to be computed faster (R8); not if there are states."""
        load, bandwidth = self._cache.config.load, self.stats.bandwidth_bytes_s
        if load is None or not bandwidth or self._cache.tree.has_state:
            return
        if self._clock() - self._measured_s > FRESH_S:
            return
        missing = arrival.boundary * self._memory.page_size - request.anchor_tokens
        rest = request.prompt - arrival.boundary * self._memory.page_size
        if 0 < load.compute_s(missing, rest) < arrival.nbytes / bandwidth:
            self.stats.slower += 1
            raise _Refused(
                f"computing {missing} tokens is estimated faster than reading {arrival.nbytes} "
                f"bytes at {bandwidth / 1e6:.0f} MB/s"
            )

    def _go_on(self, number: str, arrival: Arrival) -> None:
        if arrival.stage is Stage.READY and self._clock() > arrival.until:
            self._leave(arrival)
        if arrival.ended:
            return
        if self._clock() > arrival.until:
            raise TransferError(f"it took longer than {self._timeout_s} s")
        if arrival.stage is Stage.LOADING:
            self._load(number, arrival)
        if arrival.stage is Stage.PULLING:
            self._pull(arrival)
            lacks = arrival.sources is None or arrival.digests is None
            if lacks and self._clock() - arrival.asked_s > ASK_AGAIN_S:
                self._ask(number, arrival)

    def _load(self, number: str, arrival: Arrival) -> None:
        """When its own prefix is on DEVICE, take the slots and ask for their data."""
        request = arrival.own
        assert request is not None
        if not request.ready:
            return
        if request.load_failed:
            raise TransferError("its own prefix could not be loaded back")
        if not self._is_short(arrival):
            self._finish(arrival)
            return
        n_tokens = arrival.boundary * self._memory.page_size - request.computed
        if not self._cache.engine_slots.allocate_at(request, n_tokens):
            raise TransferError("a pool has no room for the chunk that was admitted")
        arrival.slots = self._memory.slots(request, arrival.first, arrival.boundary)
        arrival.layers = sorted({each.layer for each in self._memory.targets})
        arrival.waiting = [*arrival.layers]
        arrival.stage, arrival.begun_s = Stage.PULLING, self._clock()
        assert arrival.offer is not None
        if arrival.offer.slots:
            arrival.sources = arrival.offer
            self._start_reads(arrival)
        self._ask(number, arrival)

    def _ask(self, number: str, arrival: Arrival) -> None:
        """Ask for the digests of the data; again, where the answer may be lost."""
        arrival.asked_s = self._clock()
        pull = Pull(number, arrival.first, self._transport.address)
        self._transport.send(arrival.peer, encode(pull))

    def _take_in(
        self, number: str, arrival: Arrival, message: Offer | Sources | Digests | Withdrawn
    ) -> None:
        if isinstance(message, Withdrawn):
            raise TransferError(message.reason)
        if isinstance(message, Offer):
            if arrival.stage is Stage.ASKING:
                del self._arrivals[number]
                if not message.n_tokens:
                    raise _Refused("the peer has nothing of this prefix")
                self._begin(arrival, message)
        elif arrival.stage is Stage.PULLING:
            if isinstance(message, Sources):
                arrival.sources = message
            else:
                arrival.digests = message.digests
            self._pull(arrival)

    def _pull(self, arrival: Arrival) -> None:
        """Start reads of layers, verify those that came, finish when all are verified."""
        for layer, read in arrival.reads.items():
            state = ReadState.DONE if read is None else read.state()
            if state is ReadState.FAILED:
                raise TransferError(f"the read of layer {layer} failed; the sender is gone")
            if state is ReadState.DONE:
                arrival.reads[layer] = None
        if arrival.sources is not None:
            self._start_reads(arrival)
        self._verify(arrival)
        if len(arrival.verified) == len(arrival.layers):
            self._finish(arrival)

    def _start_reads(self, arrival: Arrival) -> None:
        """Start the reads of the next layers, as many as are read at a time."""
        moving = sum([read is not None for read in arrival.reads.values()])
        at_once = max(LAYERS_AT_ONCE, NBYTES_AT_ONCE * len(arrival.layers) // arrival.nbytes)
        while arrival.waiting and moving < at_once:
            layer = arrival.waiting.pop(0)
            source, target = self._pieces(arrival, layer)
            arrival.reads[layer] = (
                self._transport.read(arrival.peer, source, target) if len(source) else None
            )
            moving += 1

    def _pieces(self, arrival: Arrival, layer: int) -> Any:
        """One layer's rows at the sender and here."""
        theirs: list[Any] = []
        ours: list[Any] = []
        for payload in self._memory.targets:
            if payload.layer == layer:
                name = payload.component
                planes, slots = arrival.sources.planes.get(name), arrival.sources.slots.get(name)
                if planes is None or slots is None or payload.tier not in planes:
                    raise TransferError(f"{payload}: the sender does not name it")
                n_rows = self._memory.n_rows(name, arrival.first, arrival.boundary)
                behind = {tier: each[max(0, len(each) - n_rows) :] for tier, each in slots.items()}
                theirs += addresses(payload, planes, behind)
                ours += addresses(payload, self._memory.planes(name), arrival.slots[name])
        return pieces(theirs, ours)

    def _verify(self, arrival: Arrival) -> None:
        """Compare the digests of layers that came with the sender's."""
        for layer, read in arrival.reads.items():
            if read is None and layer not in arrival.checks:
                job = self._workers.submit(self._digests, layer, arrival.slots)
                arrival.checks[layer] = job
        if arrival.digests is None:
            return
        for layer, job in arrival.checks.items():
            if layer in arrival.verified or not job.done():
                continue
            for payload, digest in job.result().items():
                if arrival.digests.get(payload) != digest:
                    self.stats.damaged += 1
                    raise TransferError(f"{payload}: the payload that came is not the sender's")
            arrival.verified.add(layer)
            n_layers = len(arrival.layers)
            arrival.received_nbytes = arrival.nbytes * len(arrival.verified) // n_layers

    def _digests(
        self, layer: int, slots: Mapping[str, Mapping[Tier, Slots]]
    ) -> dict[Payload, bytes]:
        """On a worker: the digests of one layer's payloads."""
        return {
            each: self._memory.digest_of(each, slots)
            for each in self._memory.targets
            if each.layer == layer
        }

    def _finish(self, arrival: Arrival) -> None:
        """All data is here: it is computed, and shared."""
        request, cache = arrival.own, self._cache
        assert request is not None
        if self._is_short(arrival):
            cache.computed(request, arrival.boundary * self._memory.page_size - request.computed)
            cache.checkpoint(request)
            seconds = max(1e-9, self._clock() - arrival.begun_s)
            self.stats.nbytes += arrival.nbytes
            self.stats.bandwidth_bytes_s = arrival.nbytes / seconds
            self._measured_s = self._clock()
        arrival.stage, arrival.until = Stage.READY, self._clock() + self._timeout_s
        self.stats.ready += 1
        self._release(arrival)

    def _leave(self, arrival: Arrival) -> None:
        """Nobody took the request: its data stays in the cache."""
        assert arrival.own is not None
        self._cache.finish(arrival.own)
        arrival.stage, arrival.own = Stage.TAKEN, None

    def _fail(self, arrival: Arrival, error: Exception) -> None:
        """Nothing of it is published; slots that reads may write to are kept until they ended."""
        self.stats.failed += 1
        arrival.stage, arrival.reason = Stage.FAILED, str(error)
        request, arrival.own = arrival.own, None
        moving = [each for each in arrival.reads.values() if each is not None]
        moving = [each for each in moving if each.state() is ReadState.MOVING]
        if request is not None and moving:
            self._going_on.append((request, moving))
        elif request is not None:
            self._cache.abort(request)
        if not _is_deferred(arrival):
            self._release(arrival)

    def _decline(self, offer: Offer) -> None:
        """Release the answer to a question that was given up."""
        with suppress(TransferError):
            peer = self._transport.connect(offer.address)
            self._transport.send(peer, encode(Release(offer.number)))

    def _release(self, arrival: Arrival) -> None:
        if arrival.offer is not None and arrival.peer:
            with suppress(TransferError):
                self._transport.send(arrival.peer, encode(Release(arrival.offer.number)))


def _is_deferred(arrival: Arrival) -> bool:
    """Whether its offer may be tried again."""
    return arrival.decision is not None and arrival.decision.outcome is Outcome.DEFERRED


class _Refused(Exception):  # noqa: N818 - no error: the request is computed here
    """Why an offer is not followed."""
