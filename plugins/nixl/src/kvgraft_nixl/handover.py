"""The hand-over of requests between caches, as an engine calls it.

sender                                       receiver
handed = HandOver(cache, transport, ...)     handed = HandOver(cache, transport, ...)
offer = handed.offer(request)
bytes(offer) ─────── the engines' own way ──► arrival = handed.accept(offer, key, reserve=n)
handed.poll()  ◄──────── messages, reads ───► handed.poll()
                                             request = arrival.take()     when it is ready
                                             cache.begin(key)             when it failed
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from kvgraft import Cache, ConfigError, Request, TokenKey, TransferError
from kvgraft.refusals import of_type
from kvgraft.sizes import expect_count
from kvgraft_nixl.arrival import Arrival
from kvgraft_nixl.memory import CacheMemory, fingerprint
from kvgraft_nixl.messages import Ask, Digests, Offer, Pull, Release, Sources, Withdrawn, decode
from kvgraft_nixl.receiving import Receiving, ReceivingStats
from kvgraft_nixl.sending import Sending, SendingStats, Shared
from kvgraft_nixl.transport import Transport

__all__ = ["HandOver"]


class HandOver:
    """Hands requests of one cache over to others, and takes over theirs (D5).

    All calls come from the scheduler's thread, and none waits. `poll` it once per scheduler step,
    beside the cache. Close it before the cache.

    Args:
        cache: on pools of the CPU that keep their size; not one of several ranks.
        transport: this process's end; it is closed with the hand-over.
        model: the model's name.
        weights: the revision of its weights. Data of another model or revision is never taken.
        sharding: the part of the model that this cache holds; None for all of it.
        salt: anything else that must tell data apart.
        timeout_s: longest time of an arrival; and for which a ready one waits for its engine.
        hold_s: time for which the sender keeps an offer's pins, and once more when it is pulled.
        max_offers: most offers held at a time.
        max_arrivals: most arrivals at a time, with failed ones whose reads go on.
        clock: monotonic, in seconds.

    Raises:
        ConfigError: a cache that cannot be read by address, no transport, or a bound that is none.
        TransferError: the transport cannot register the pools.
    """

    def __init__(  # noqa: PLR0913 - each given by its name
        self,
        cache: Cache,
        transport: Transport,
        *,
        model: str,
        weights: str,
        sharding: Any = None,
        salt: Any = None,
        timeout_s: float = 30.0,
        hold_s: float = 60.0,
        max_offers: int = 256,
        max_arrivals: int = 64,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not isinstance(cache, Cache):
            raise ConfigError(f"hand-over: {of_type(cache)} is no Cache")
        if not hasattr(transport, "register"):
            raise ConfigError(f"hand-over: {of_type(transport)} is no transport; see NixlTransport")
        seconds: dict[str, object] = {"timeout_s": timeout_s, "hold_s": hold_s}
        for name, value in seconds.items():
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"hand-over: {name}={value!r}; give seconds above 0")
        for name, count in (("max_offers", max_offers), ("max_arrivals", max_arrivals)):
            expect_count(f"hand-over: {name}", count, least=1)
        self._cache = cache
        self._transport = transport
        memory = CacheMemory(cache)
        transport.register(memory.regions())
        self._workers = ThreadPoolExecutor(1, "kvgraft-hand-over")
        mine = fingerprint(cache, model=model, weights=weights, sharding=sharding, salt=salt)
        shared = Shared(cache, memory, mine, transport, self._workers, clock)
        self._sending = Sending(shared, hold_s, max_offers)
        self._receiving = Receiving(shared, timeout_s, max_arrivals, self.poll)
        self._closed = False

    def __enter__(self) -> HandOver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> bytes:
        """Others `fetch` prefixes from here by this address."""
        return self._transport.address

    @property
    def sending(self) -> SendingStats:
        """Counts of offers."""
        return self._sending.stats

    @property
    def receiving(self) -> ReceivingStats:
        """Counts of arrivals."""
        return self._receiving.stats

    @property
    def n_offers(self) -> int:
        """Offers whose pins are held."""
        return len(self._sending)

    @property
    def n_arrivals(self) -> int:
        """Arrivals under way, ready ones that nobody took, and failed ones whose reads go on."""
        return len(self._receiving) + self._receiving.n_going_on

    # -- sender

    def offer(self, given: TokenKey | Request) -> Offer | None:
        """Offer what is cached of a sequence, or computed of a running request.

        A running request's data is shared first, as by `Cache.checkpoint`; tokens behind the last
        boundary that can be resumed from are the receiver's to compute. It may go on, or finish.

        Returns:
            The offer; its data is pinned until the receiver has it, the offer is withdrawn, or its
            time is over. None where nothing is cached, or `max_offers` are held.

        Raises:
            LeaseError: a request that is not admitted, or whose key was cut.
            ConfigError: a namespace that has no name in other processes.
            TransferError: the hand-over is closed.
        """
        self._expect_open("offer")
        if isinstance(given, Request):
            self._cache.checkpoint(given)
            given = given.key
        return self._sending.offer(given)

    def withdraw(self, offer: Offer) -> bool:
        """Release an offer's pins; whether they were held."""
        return self._sending.release(offer.number)

    # -- receiver

    def accept(self, offer: Offer | bytes, key: TokenKey, **arguments: Any) -> Arrival:
        """Take over a request: admit it, and read the data that it lacks.

        Args:
            offer: of the sender.
            key: the same tokens, and at least one behind those of the offer, such as the first
                that the sender sampled.
            arguments: as for `Cache.begin`: reserve, chunk, hint, resume_at, priority, ttl_s.

        Returns:
            The arrival. It failed already if the offer is damaged, of other tokens or another
            model, or if the request is not admitted: `arrival.decision` says which pool is short.
            If it was deferred, try again later with the same offer, or `give_up` and compute.

        Raises:
            ConfigError: arguments that `Cache.begin` refuses.
            TransferError: the hand-over is closed.
        """
        self._expect_open("accept")
        return self._receiving.accept(bytes(offer), key, arguments)

    def fetch(self, address: bytes, key: TokenKey, **arguments: Any) -> Arrival:
        """Ask a peer for the longest prefix of a key that it has, and take that over.

        The rest is as for `accept`; it fails where the peer has nothing, or `Cache.begin` refuses
        the arguments.

        Raises:
            ConfigError: a key that cannot be asked for.
            TransferError: the hand-over is closed.
        """
        self._expect_open("fetch")
        return self._receiving.fetch(address, key, arguments)

    def give_up(self, arrival: Arrival) -> None:
        """Give up an arrival: it fails, or leaves its data to the cache if it is ready."""
        self._receiving.give_up(arrival)

    # -- both

    def poll(self) -> None:
        """Take in messages, go on with all arrivals, and release offers that are over.

        After `close` it does nothing.
        """
        if self._closed:
            return
        for message in self._transport.received():
            try:
                self._hear(decode(message.payload))
            except TransferError:
                continue  # its sender's time runs out
        self._sending.poll()
        self._receiving.poll()

    def close(self) -> None:
        """Release all offers and give up all arrivals."""
        if self._closed:
            return
        self._closed = True
        self._sending.close()
        self._receiving.give_up_all()
        self._transport.close()
        self._workers.shutdown()
        self._receiving.close()

    # -- inside

    def _expect_open(self, call: str) -> None:
        if self._closed:
            raise TransferError(f"{call}: the hand-over is closed; make another")

    def _hear(self, message: Any) -> None:
        if isinstance(message, Ask):
            self._sending.answer(message)
        elif isinstance(message, Pull):
            self._sending.pull(message)
        elif isinstance(message, Release):
            if self._sending.release(message.number):
                self._sending.stats.released += 1
        elif isinstance(message, (Offer, Sources, Digests, Withdrawn)):
            self._receiving.heard(message)
