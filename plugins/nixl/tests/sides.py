"""Two caches with their hand-over, connected by wires."""

from __future__ import annotations

from typing import Any

from kvgraft import TokenKey
from kvgraft_nixl import Arrival, HandOver

from .contents import Engine, open_cache
from .wires import Wires


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Side:
    """A cache with its engine and its hand-over."""

    def __init__(self, wires: Wires, name: str, components: str, **settings: Any) -> None:
        self.wires = wires
        self.clock = Clock()
        bounds = {"timeout_s", "hold_s", "max_offers", "max_arrivals", "weights"}
        given = {name: settings.pop(name) for name in [*settings] if name in bounds}
        self.cache = open_cache(components, guard="on", **settings)
        self.engine = Engine(self.cache)
        arguments = {"model": "tiny", "weights": "1", "clock": self.clock, **given}
        self.handed = HandOver(self.cache, wires.end(name), **arguments)

    def computed(self, tokens: list[int], namespace: object = None) -> Any:
        """A request that has computed all tokens."""
        request = self.engine.begin(TokenKey(tokens, namespace), chunk=64)
        assert request is not None
        self.engine.prefill(request)
        return request

    def close(self) -> None:
        self.handed.close()
        for request in [*self.cache.requests.values()]:
            self.cache.abort(request)
        assert self.cache.drain()
        self.cache.check_integrity()
        for each in self.cache.stats().components.values():
            assert each.device.private == each.device.pinned == 0, each
        self.cache.close()


class Pair:
    def __init__(self, components: str, **settings: Any) -> None:
        self.wires = Wires()
        self.sender = Side(self.wires, "sender", components, **settings)
        self.receiver = Side(self.wires, "receiver", components, **settings)

    def move(self, arrival: Arrival, *, steps: int = 400, pieces: int = 7) -> None:
        """Let both sides work until the arrival has ended."""
        for _ in range(steps):
            self.step(pieces)
            if arrival.ended:
                return
        raise AssertionError(f"{arrival} has not ended")

    def step(self, pieces: int = 1 << 30) -> None:
        for side in (self.sender, self.receiver):
            side.cache.drain()
            side.handed.poll()
            wait(side.handed)
        self.wires.step(pieces)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()


def wait(handed: HandOver) -> None:
    """Until the worker has computed the digests that it was asked for."""
    handed._workers.submit(int).result(10)
