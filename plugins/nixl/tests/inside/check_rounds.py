"""Random rounds of hand-overs between processes: killed, hanging, wrong and short of memory.

`KVGRAFT_HAND_OVER_ROUNDS` is their number.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from kvgraft import Request, TokenKey

from ..contents import PAGE, words
from .peer import Node, Peer

ROUNDS = int(os.environ.get("KVGRAFT_HAND_OVER_ROUNDS", "12"))
SMALL = {"device_tokens": 1024, "host_tokens": 1600}
BOUNDS = {"timeout_s": 1.0, "hold_s": 2.0}
EVENTS = (
    *("none", "none", "none", "killed", "killed midway", "hangs"),
    *("wrong digest", "given up", "crowded", "receiver killed"),
)


class Rounds:
    """This process and another one; either takes over from the other."""

    def __init__(self, components: str, seed: int) -> None:
        self.components = components
        self.random = random.Random(seed)
        self.here = Node(components, SMALL, **BOUNDS)
        self.there = self.new_peer()
        self.numbers = iter(range(1 << 30))
        self.counts = dict.fromkeys(("taken over", "computed", "sent", "processes"), 0)

    def new_peer(self) -> Peer:
        return Peer(self.components, SMALL, **BOUNDS)

    def round(self) -> None:
        event = self.random.choice(EVENTS)
        tokens = words(self.random.randrange(2 * PAGE, 480), self.random.randrange(40))
        if self.random.random() < 0.3 or event == "receiver killed":
            self.send(tokens, event)
        else:
            self.receive(tokens, event)
        self.here.cache.check_integrity()

    def receive(self, tokens: list[int], event: str) -> None:
        """This process takes a request over, or computes it."""
        number = next(self.numbers)
        if self.there.ask("compute", number, tokens) < 0:
            return
        if event == "wrong digest":
            self.there.ask("wrong_digests", 1)
        offer = self.there.ask("offer", number)
        if self.random.random() < 0.5:
            self.there.ask("finish", number)
        key, chunk = TokenKey([*tokens, 7]), self.random.choice([PAGE, 64])
        others = self.crowd() if event == "crowded" else []
        if offer is not None and self.random.random() < 0.7:
            arrival = self.here.handed.accept(offer, key, chunk=chunk, reserve=20)
        else:
            arrival = self.here.handed.fetch(self.there.ask("address"), key, chunk=chunk)
        if event == "killed midway":
            self.here.until(lambda: bool(arrival.reads) or arrival.ended)
        if event.startswith("killed"):
            self.replace()
        if event == "hangs":
            self.there.signal(signal.SIGSTOP)
        if event == "given up":
            self.here.poll()
            self.here.handed.give_up(arrival)
        start = time.monotonic()
        assert self.here.until(lambda: arrival.ended, 20.0)
        assert time.monotonic() - start < BOUNDS["timeout_s"] + 5.0
        if event == "hangs":
            self.there.signal(signal.SIGCONT)
        request: Request | None
        if arrival.stage.value == "ready":
            request = arrival.take()
            self.counts["taken over"] += 1
        else:
            request = self.here.engine.begin(key, chunk=chunk)
            self.counts["computed"] += 1
        for other in others:
            self.here.cache.abort(other)
        if request is None:
            held = self.here.handed.n_offers + self.here.handed.n_arrivals
            assert others or held, "an empty cache has room"
            return
        self.here.engine.expect(request, request.computed // PAGE)
        self.here.engine.prefill(request)
        self.here.cache.finish(request)

    def send(self, tokens: list[int], event: str) -> None:
        """The other process takes a request over, or dies meanwhile."""
        request = self.here.engine.begin(TokenKey(tokens), chunk=64)
        if request is None:
            held = self.here.handed.n_offers + self.here.handed.n_arrivals
            assert held, "an empty cache has room"
            return
        self.here.engine.prefill(request)
        offer = self.here.handed.offer(request)
        self.here.cache.finish(request)
        if offer is None:
            return
        number = next(self.numbers)
        self.counts["sent"] += 1
        admitted = self.there.ask("accept", number, bytes(offer), [*tokens, 7])
        if event == "receiver killed":
            self.here.poll()
            self.replace()
        elif admitted:
            self.there.connection.send(("arrived", (number,)))
            assert self.here.until(lambda: self.there.connection.poll(0), 20.0)
            found = self.there.connection.recv()
            assert not isinstance(found, Exception), found

    def crowd(self) -> list[Request]:
        """Requests that hold most of this cache."""
        made = [
            self.here.engine.begin(TokenKey(words(400, 100 + each)), chunk=64) for each in range(2)
        ]
        for request in made:
            if request is not None:
                self.here.engine.prefill(request)
        return [request for request in made if request is not None]

    def replace(self) -> None:
        self.there.kill()
        self.there = self.new_peer()
        self.counts["processes"] += 1

    def end(self) -> None:
        """Nothing is left on either side."""
        assert self.here.until(
            lambda: (self.here.handed.n_offers, self.here.handed.n_arrivals) == (0, 0), 30.0
        )
        assert self.here.until(lambda: self.there.ask("held")[0] == 0, 30.0)
        self.here.close()
        self.there.end()


@pytest.mark.parametrize("components", ["hybrid", "home on host"])
def test_random_rounds_between_processes_lose_nothing_and_leak_nothing(components: str) -> None:
    rounds = Rounds(components, 40)
    for _ in range(ROUNDS):
        rounds.round()
    rounds.end()
    assert ROUNDS < 12 or (rounds.counts["taken over"] and rounds.counts["computed"])
