"""A subscriber in the tests' own process, and requests whose events it gets."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from kvgraft import Cache, TokenKey
from tests.serving import life

__all__ = ["WAIT_MS", "Batches", "Listener", "events_of", "has", "serve"]

END = b"\xff" * 8
"""The sequence number that ends a replay."""

Batches = list[tuple[int, list[dict[str, Any]]]]
"""Numbers and events of messages."""

WAIT_MS = 20_000
"""Longest wait for a message that must come."""


def serve(cache: Cache, first: int, n_tokens: int, namespace: object = None) -> None:
    """One request, whose copies have ended and whose events were delivered."""
    life.serve(cache, TokenKey(range(first, first + n_tokens), namespace))
    cache.drain()
    cache.poll()


class Listener:
    """Subscribes in this process, and asks for replays."""

    def __init__(self, endpoint: str, replay: str, *, ipv6: bool = False) -> None:
        self.context = zmq.Context()
        self.context.setsockopt(zmq.IPV6, ipv6)
        self.live = self.context.socket(zmq.SUB)
        self.live.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.live.connect(endpoint)
        self.live.setsockopt(zmq.SUBSCRIBE, b"")
        self.asking = self.context.socket(zmq.DEALER)
        self.asking.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        self.asking.connect(replay)

    def frames(self, since: int, *delimiter: bytes) -> list[list[bytes]]:
        """The answer to a request for the batches since a number, message by message."""
        found: list[list[bytes]] = []
        self.asking.send_multipart((*delimiter, since.to_bytes(8, "big")))
        while not found or found[-1][-2] != END:
            found.append(self.asking.recv_multipart())
            assert found[-1][:-3] == [*delimiter]
        return found

    def replay(self, since: int, *delimiter: bytes) -> Batches:
        """The batches since a number."""
        return [
            (int.from_bytes(sequence, "big"), msgspec.msgpack.decode(payload)[1])
            for *_, sequence, payload in self.frames(since, *delimiter)[:-1]
        ]

    def until(self, wanted: Callable[[Batches], bool], since: int = 0) -> Batches:
        """Ask again and again, until a replay has all that is wanted."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not wanted(found := self.replay(since, b"")):
            assert time.monotonic() < deadline, found
            time.sleep(0.005)
        return found

    def close(self) -> None:
        self.context.destroy(linger=0)


def events_of(batches: Batches) -> list[dict[str, Any]]:
    return [event for _, events in batches for event in events]


def has(kind: str, n_times: int = 1) -> Callable[[Batches], bool]:
    return lambda batches: [each["type"] for each in events_of(batches)].count(kind) >= n_times
