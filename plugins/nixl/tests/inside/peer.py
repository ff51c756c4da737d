"""A process with a cache and its hand-over: it computes, offers and takes over as it is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from kvgraft import TokenKey
from kvgraft_nixl import HandOver, NixlTransport

from ..contents import Engine, open_cache

LOOPBACK = {"UCX_NET_DEVICES": "lo", "UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "FATAL"}
"""UCX and NIXL stay on this machine."""

LOOPBACK["UCX_HANDLE_ERRORS"] = "none"
LOOPBACK["UCX_LOG_LEVEL"] = "fatal"


class Node:
    """One process's cache, engine and hand-over."""

    def __init__(
        self, components: str, settings: dict[str, Any] | None = None, **bounds: Any
    ) -> None:
        os.environ.update(LOOPBACK)
        self.cache = open_cache(components, **{"guard": "on", **(settings or {})})
        self.engine = Engine(self.cache)
        given = {"model": "tiny", "weights": "1", **bounds}
        self.handed = HandOver(self.cache, NixlTransport(), **given)

    def poll(self) -> None:
        self.cache.poll()
        self.handed.poll()

    def until(self, over: Any, timeout_s: float = 60.0) -> bool:
        """Work until something is true; whether it is."""
        end = time.monotonic() + timeout_s
        while not over():
            if time.monotonic() > end:
                return False
            self.poll()
            time.sleep(0.0005)
        return True

    def close(self) -> None:
        """End; raises if a slot, a pin or an offer is left."""
        self.handed.close()
        for request in [*self.cache.requests.values()]:
            self.cache.abort(request)
        assert self.cache.drain()
        self.cache.check_integrity()
        for each in self.cache.stats().components.values():
            assert each.device.private == each.device.pinned == 0, each
        self.cache.close()


class Peer:
    """Another process, which does what it is asked, and polls in between."""

    def __init__(self, components: str, settings: Any = None, **bounds: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, components, settings, bounds), daemon=True
        )
        self.process.start()
        theirs.close()

    def ask(self, call: str, *arguments: Any) -> Any:
        self.connection.send((call, arguments))
        assert self.connection.poll(60), f"{call}: no answer"
        found = self.connection.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(30)

    def end(self) -> None:
        self.ask("close")
        self.process.join(30)
        assert self.process.exitcode == 0


def serve(connection: Connection, components: str, settings: Any, bounds: Any) -> None:
    """Do what the other process asks until it closes the connection."""
    node = Node(components, settings, **bounds)
    calls = Calls(node)
    while True:
        if not connection.poll(0.0005):
            node.poll()
            continue
        try:
            call, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(getattr(calls, call)(*arguments))
        except Exception as error:  # noqa: BLE001 - the other process raises it
            connection.send(error)
        if call == "close":
            return


class Calls:
    """The calls that a peer answers."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.requests: dict[int, Any] = {}
        self.arrivals: dict[int, Any] = {}

    def compute(self, number: int, tokens: list[int]) -> int:
        """Compute a request and keep it; the tokens that were cached, -1 if it has no room."""
        request = self.node.engine.begin(TokenKey(tokens), chunk=64)
        if request is None:
            return -1
        cached: int = request.anchor_tokens
        self.node.engine.prefill(request)
        self.requests[number] = request
        return cached

    def offer(self, number: int) -> bytes | None:
        offer = self.node.handed.offer(self.requests[number])
        return None if offer is None else bytes(offer)

    def finish(self, number: int) -> int:
        return self.node.cache.finish(self.requests.pop(number))

    def address(self) -> bytes:
        return self.node.handed.address

    def wrong_digests(self, n_calls: int) -> None:
        """The next digests that are computed are wrong in one bit."""
        memory = self.node.handed._sending._memory
        right = type(memory).digest_of
        left = [n_calls]

        def wrong(payload: Any, slots: Any) -> bytes:
            found = right(memory, payload, slots)
            if left[0] > 0:
                left[0] -= 1
                return bytes([found[0] ^ 1]) + found[1:]
            return found

        memory.digest_of = wrong  # type: ignore[method-assign]

    def accept(self, number: int, offer: bytes, tokens: list[int]) -> bool:
        """Take over a request; whether it was admitted."""
        arrival = self.node.handed.accept(offer, TokenKey(tokens), chunk=64)
        self.arrivals[number] = arrival
        return not arrival.failed

    def arrived(self, number: int) -> int:
        """Wait for an arrival, compare and finish it; its tokens, or -1 if it failed."""
        arrival = self.arrivals.pop(number)
        assert self.node.until(lambda: arrival.ended)
        if arrival.failed:
            return -1
        request = arrival.take()
        tokens: int = request.computed
        self.node.engine.expect(request, tokens // self.node.cache.config.page_size)
        self.node.engine.prefill(request)
        self.node.cache.finish(request)
        return tokens

    def held(self) -> tuple[int, int]:
        return self.node.handed.n_offers, self.node.handed.n_arrivals

    def close(self) -> None:
        self.node.close()
