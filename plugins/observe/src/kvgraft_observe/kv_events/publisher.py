"""Sends a cache's events over ZMQ, from a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from itertools import count
from threading import Lock, Thread
from types import TracebackType

import msgspec
import zmq

from kvgraft import Cache, ConfigError, KvgraftError
from kvgraft.refusals import shown
from kvgraft_observe.arguments import expect_count, expect_type
from kvgraft_observe.events import Cleared, Event
from kvgraft_observe.kv_events.replaying import ReplayBuffer
from kvgraft_observe.kv_events.translating import (
    Names,
    Report,
    Translator,
    WireEvent,
    names_of,
)
from kvgraft_observe.kv_events.wire import END, AllBlocksCleared, Batch

__all__ = ["KvEventPublisher", "expect_addresses"]

logger = logging.getLogger("kvgraft")

BATCH_EVENTS = 256
"""Most events of one message."""

MOST = 10**9
"""Largest number of messages, which ZMQ counts with int32."""

ANY_ADDRESS = ("*", ":0")
"""Endings of addresses that stand for any free port."""

CLOSE_S = 5.0
"""Longest wait for the thread when closing."""

LINGER_MS = 1000
"""Time that unsent messages have after closing."""


class KvEventPublisher:
    """Publishes a cache's events in vLLM's format, with replay of missed batches.

    The cache's thread only hands events over, in its polls. The publisher's thread hashes, packs
    and sends them. If it lags too far behind, the events are dropped and counted, and subscribers
    get `AllBlocksCleared`, then a snapshot (V3).

    A subscriber that missed batches asks the replay socket for those since a number. If they are no
    longer kept, the publisher sends everything anew, to all subscribers.

    Args:
        cache: the cache; call this on its thread.
        bind: address to publish on, such as `tcp://*:5557`.
        connect: a subscriber's address to connect to instead.
        replay: address of the replay socket; None for none.
        topic: the messages' topic; llm-d expects `kv@POD@MODEL`.
        data_parallel_rank: data-parallel rank of this engine.
        components: components whose blocks are reported; all by default.
        report: `components` for the blocks of each, `resumable` for those up to which a request
            could resume with all of them, as one group of full attention.
        names: says which adapter and salt a namespace stands for.
        replay_batches: most batches kept for replays.
        replay_nbytes: most bytes of them.
        lag_events: most events that wait for the publisher's thread, not counting a snapshot.
        high_water_mark: most messages that wait for a slow subscriber; it misses later ones.

    Attributes:
        endpoint: the address it publishes on, with the port that `tcp://*:*` got.
        replay_endpoint: the address of the replay socket; None without one.

    Raises:
        ConfigError: both or neither of `bind` and `connect`, an address that cannot be used or is
            given twice, a component that the cache does not have, or another argument of a wrong
            type.
    """

    def __init__(  # noqa: PLR0913 - the options of a configuration
        self,
        cache: Cache,
        *,
        bind: str | None = None,
        connect: str | None = None,
        replay: str | None = None,
        topic: str = "",
        data_parallel_rank: int = 0,
        components: Collection[str] | None = None,
        report: Report = "components",
        names: Callable[[object], Names] = names_of,
        replay_batches: int = 10_000,
        replay_nbytes: int = 1 << 28,
        lag_events: int = 262_144,
        high_water_mark: int = 100_000,
    ) -> None:
        if (bind is None) == (connect is None):
            raise ConfigError("KV events: give bind or connect, one of them")
        if (
            replay is not None
            and replay in (bind, connect)
            and not str(replay).endswith(ANY_ADDRESS)
        ):
            raise ConfigError(
                f"KV events: replay={shown(replay)} is the address of the events; give another"
            )
        expect_type("KV events: topic", topic, str, "text, such as 'kv@POD@MODEL'")
        for name, number, least in (
            ("data_parallel_rank", data_parallel_rank, 0),
            ("replay_batches", replay_batches, 0),
            ("replay_nbytes", replay_nbytes, 0),
            ("lag_events", lag_events, 1),
            ("high_water_mark", high_water_mark, 1),
        ):
            most = None if name == "replay_nbytes" else MOST
            expect_count(f"KV events: {name}", number, least, most)
        self._translator = Translator(cache, components, names, report)
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._buffer = ReplayBuffer(replay_batches, replay_nbytes)
        self._encoder = msgspec.msgpack.Encoder()
        self._sequence = count()
        self._lag_events = lag_events
        self._waiting: deque[list[Event]] = deque()
        self._n_waiting = 0
        self._failure: Exception | None = None
        self._lock = Lock()
        """Held while the events that wait are changed, by either thread."""
        self._began_again = self._closing = False
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint: str | None = None
        try:
            self._socket = self._context.socket(zmq.PUB)
            self._socket.set_hwm(high_water_mark)
            self.endpoint = _open(self._socket, bind, connect)
            if replay is not None:
                self._replay = self._context.socket(zmq.ROUTER)
                # a whole replay and its end, twice: subscribers acknowledge by halves
                self._replay.setsockopt(zmq.SNDHWM, 2 * (replay_batches + 1))
                self.replay_endpoint = _open(self._replay, replay, None)
            self._wakes, self._wake = socket.socketpair()
            self._wakes.setblocking(False)
            self._wake.setblocking(False)
            self._stream = cache.observe(self._take)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = Thread(target=self._run, name="kvgraft-kv-events", daemon=True)
        self._thread.start()

    def __enter__(self) -> KvEventPublisher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def lost(self) -> int:
        """Events that were dropped; subscribers were sent a snapshot instead."""
        return self._stream.lost

    def close(self) -> None:
        """Send the last poll's events and end, on the cache's thread; may be called twice."""
        if self._closing:
            return
        self._stream.close()
        self._closing = True
        self._wake_up()
        self._thread.join(CLOSE_S)
        self._wakes.close()
        self._wake.close()

    # -- on the cache's thread

    def _take(self, events: list[Event]) -> None:
        """Hand the events of a poll over; an error makes the stream begin again (V3)."""
        if self._failure is not None:
            raise KvgraftError(f"KV events: publishing ended with {self._failure!r}")
        begins = isinstance(events[0], Cleared)
        with self._lock:
            if begins:
                self._waiting.clear()  # the snapshot covers them
                self._n_waiting = 0
            elif self._n_waiting + len(events) > self._lag_events:
                raise KvgraftError(
                    f"KV events: {self._n_waiting} + {len(events)} events wait to be published, "
                    f"more than {self._lag_events}; they are dropped"
                )
            else:
                self._n_waiting += len(events)
            self._waiting.append(events)
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the thread has not taken the earlier ones yet
            self._wake.send(b"\0")

    # -- on the publisher's thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001 - the next poll says so
            self._failure = error
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _serve(self) -> None:
        """Publish, and answer replay requests, until it is closed."""
        poller = zmq.Poller()
        poller.register(self._wakes, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        ends = False
        while not ends:
            ready = dict(poller.poll())
            if self._wakes.fileno() in ready:
                self._wakes.recv(4096)
            ends = self._closing
            self._publish()
            if self._replay is not None and self._replay in ready:
                self._answer(self._replay)

    def _publish(self) -> None:
        """Send the events that wait."""
        while True:
            with self._lock:
                if not self._waiting:
                    return
                events = self._waiting.popleft()
                if not isinstance(events[0], Cleared):
                    self._n_waiting -= len(events)
            for batch in _batches(self._translator.translate(events)):
                self._send(batch)

    def _send(self, events: list[WireEvent]) -> None:
        sequence = next(self._sequence)
        payload = self._encoder.encode(Batch(time.time(), events, self._rank))
        clears = isinstance(events[0], AllBlocksCleared)
        self._buffer.add(sequence, payload, clears=clears)
        if clears:
            self._began_again = False
        self._socket.send_multipart((self._topic, sequence.to_bytes(8, "big"), payload))

    def _answer(self, replay: zmq.Socket[bytes]) -> None:
        """Send the batches since the number that a subscriber asks for, and the end."""
        client, *delimiter, asked = replay.recv_multipart()
        if delimiter not in ([], [b""]) or len(asked) != len(END):
            logger.warning("KV events: a replay was asked for in %d bytes, not 8", len(asked))
            return
        sequence = int.from_bytes(asked, "big")
        for kept in self._buffer.since(sequence):
            number = kept.sequence.to_bytes(8, "big")
            replay.send_multipart((client, *delimiter, self._topic, number, kept.payload))
        if not self._buffer.suffices(sequence) and not self._began_again:
            self._began_again = True
            self._stream.begin_again()
        replay.send_multipart((client, *delimiter, b"", END, b""))


def _batches(events: Iterator[WireEvent]) -> Iterator[list[WireEvent]]:
    """Events in batches of bounded length; an `AllBlocksCleared` begins a batch."""
    batch: list[WireEvent] = []
    for event in events:
        if batch and (len(batch) == BATCH_EVENTS or isinstance(event, AllBlocksCleared)):
            yield batch
            batch = []
        batch.append(event)
    if batch:
        yield batch


def expect_addresses(*addresses: str) -> None:
    """Listen on addresses for a moment, before much is done for a publisher that is to use them.

    Raises:
        ConfigError: one cannot be listened on.
    """
    with zmq.Context() as context:
        for address in addresses:
            with context.socket(zmq.PUB) as opened:
                _open(opened, address, None)


def _open(opened: zmq.Socket[bytes], bind: str | None, connect: str | None) -> str:
    """Bind or connect a socket; its address.

    Raises:
        ConfigError: that is not possible.
    """
    address = bind if bind is not None else connect
    try:
        opened.setsockopt(zmq.IPV6, int("[" in str(address)))
        if bind is not None:
            opened.bind(bind)
            return opened.getsockopt_string(zmq.LAST_ENDPOINT)
        assert connect is not None
        opened.connect(connect)
    except (zmq.ZMQError, TypeError, ValueError) as error:
        verb = "listen on" if bind is not None else "connect to"
        raise ConfigError(f"KV events: cannot {verb} {address!r:.60}: {error}") from error
    return connect
