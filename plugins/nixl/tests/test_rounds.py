"""Random rounds of hand-overs over bad wires, between caches that are short of memory (D5).

`KVGRAFT_HAND_OVER_ROUNDS` is their number for each set of components.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from kvgraft import Request, TokenKey
from kvgraft_nixl import Arrival

from .contents import PAGE, SETS, words
from .sides import Side
from .wires import Wires

ROUNDS = int(os.environ.get("KVGRAFT_HAND_OVER_ROUNDS", "12"))
SMALL = {"device_tokens": 640, "host_tokens": 1200}


class Fleet:
    """Three caches, each of which sends and takes over."""

    def __init__(self, components: str, seed: int) -> None:
        self.components = components
        self.random = random.Random(seed)
        self.wires = Wires(seed)
        self.n_made = 0
        self.sides = [self.made() for _ in range(3)]
        self.prompts = [words(self.random.randrange(PAGE, 480), each) for each in range(8)]
        self.counts = dict.fromkeys(("taken over", "computed", "refused", "killed"), 0)

    def made(self) -> Side:
        self.n_made += 1
        return Side(self.wires, f"side {self.n_made}", self.components, **SMALL)

    def step(self) -> None:
        for side in self.sides:
            side.cache.drain()
            side.handed.poll()
            side.handed._workers.submit(int).result(10)
            side.clock.now += 0.3
        self.wires.step(self.random.choice([0, 1, 5, 1 << 30]))

    def disturb(self) -> None:
        """Something goes wrong, or well again."""
        draw = self.random.random
        self.wires.damage = self.random.choice([0.0, 0.0, 0.01])
        self.wires.lost = self.random.choice([0.0, 0.0, 0.2])
        self.wires.slow = draw() < 0.15
        if draw() < 0.1:
            self.kill(self.random.choice(self.sides))

    def kill(self, side: Side) -> None:
        """A process dies; another takes its place, with an empty cache."""
        self.counts["killed"] += 1
        name = side.handed.address.decode()
        self.wires.dead.add(name)
        self.wires.ends[name].close()
        side.close()  # of the test alone: nobody hears of it
        self.sides[self.sides.index(side)] = self.made()

    def round(self) -> None:
        """One request is computed, maybe shared, and goes to another side; others run beside."""
        pick = self.random.choice
        sender, receiver = self.random.sample(self.sides, 2)
        prompt = pick(self.prompts)
        tokens = [
            *prompt[: self.random.randrange(PAGE, len(prompt) + 1)],
            *words(9, pick(range(9))),
        ]
        request = self.begun(sender, tokens)
        if request is None:
            return
        sender.engine.prefill(request, self.random.randrange(request.computed, len(tokens)) + 1)
        offer = sender.handed.offer(request)
        finishes = self.random.random() < 0.5
        if finishes:
            sender.engine.prefill(request)
            sender.cache.finish(request)
        key, arguments = TokenKey([*tokens, 3]), self.arguments()
        if offer is not None and self.random.random() < 0.7:
            arrival = receiver.handed.accept(offer, key, **arguments)
        else:
            arrival = receiver.handed.fetch(sender.handed.address, key, **arguments)
        for _ in range(self.random.randrange(40)):
            if arrival.ended or receiver not in self.sides:
                break
            if self.random.random() < 0.2:
                self.disturb()
            if self.random.random() < 0.2:
                pick(self.sides).engine.serve(words(self.random.randrange(1, 300), pick(range(30))))
            if self.random.random() < 0.05:
                receiver.handed.give_up(arrival)
            self.step()
        if not finishes and sender in self.sides:
            sender.cache.abort(request)
        if receiver in self.sides:
            self.answered(receiver, arrival, tokens)
        for side in self.sides:
            side.cache.check_integrity()

    def arguments(self) -> dict[str, Any]:
        return {
            "reserve": self.random.choice([0, 40]),
            "chunk": self.random.choice([PAGE, 64, 200]),
        }

    def begun(self, side: Side, tokens: list[int]) -> Request | None:
        request = side.engine.begin(TokenKey(tokens), chunk=64)
        if request is not None:
            side.engine.expect(request, request.anchor_tokens // PAGE)
        return request

    def answered(self, receiver: Side, arrival: Arrival, tokens: list[int]) -> None:
        """The request goes on where it is, whatever became of the hand-over."""
        while not arrival.ended:
            self.step()
        request: Request | None
        if arrival.failed:
            assert arrival.reason
            request = self.begun(receiver, [*tokens, 3])
            self.counts["computed" if request is not None else "refused"] += 1
        elif self.random.random() < 0.1:
            receiver.handed.give_up(arrival)
            return
        else:
            request = arrival.take()
            self.counts["taken over"] += 1
        if request is None:
            return
        receiver.engine.expect(request, request.computed // PAGE)
        receiver.engine.prefill(request)
        for token in range(self.random.randrange(20)):
            request.key.extend([token])
            if not receiver.cache.allocate(request, 1):
                break
            receiver.engine.compute(request, 1)
        receiver.cache.retract(request)

    def end(self) -> None:
        """All works again, and time passes: nothing is left."""
        self.wires.slow = False
        self.wires.lost = self.wires.damage = 0.0
        for _ in range(4):
            for side in self.sides:
                side.clock.now += 100.0
            self.step()
            self.wires.step()
        for side in self.sides:
            assert (side.handed.n_offers, side.handed.n_arrivals) == (0, 0)
            side.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("components", [*SETS])
@pytest.mark.rule("D5")
def test_random_rounds_lose_nothing_and_leak_nothing(components: str) -> None:
    fleet = Fleet(components, 40)
    for _ in range(ROUNDS):
        fleet.round()
    fleet.end()
    if ROUNDS >= 12:
        assert fleet.counts["taken over"]
        assert fleet.counts["computed"]
