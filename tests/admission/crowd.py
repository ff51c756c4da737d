"""Requests in every stage at once, moved on by a source of randomness."""

from __future__ import annotations

from random import Random

from kvgraft.admission import Outcome
from kvgraft.cache import Cache
from kvgraft.requests.request import Request

from ..serving.engines import PromptEngine
from ..serving.server import Server

__all__ = ["Crowd"]

SYSTEM = [[7] * 8, [8] * 8, [7] * 6 + [9] * 6]


class Crowd:
    """A server whose requests are all somewhere between begin and finish.

    Every allocation within a reservation must succeed, in the chunks that were promised (A7).

    Attributes:
        leased: begun, not admitted.
        running: admitted.
        outcomes: counts of admission's outcomes.
    """

    def __init__(self, cache: Cache, engine: PromptEngine, random: Random) -> None:
        self.cache, self.engine, self.random = cache, engine, random
        self.server = Server(cache)
        self.leased: list[Request] = []
        self.running: list[Request] = []
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.finished: list[list[int]] = []
        self.fresh = 100

    def tokens(self) -> list[int]:
        """A prompt that shares a prefix with others, or goes on where one of them ended."""
        if self.finished and self.random.random() < 0.6:
            self.fresh += 1
            return [*self.random.choice(self.finished[-3:]), *[self.fresh] * 3]
        own = self.random.choice([0, 1, 2])
        self.fresh += 1
        tail = [own] * self.random.randint(0, 6) + [self.fresh] * self.random.randint(1, 6)
        return [*self.random.choice(SYSTEM), *tail]

    def move(self) -> None:
        """One step of somebody, then check every book."""
        self.random.choice(
            [self.arrive, self.ask, self.ask, self.go_on, self.go_on, self.go_on, self.end,
             self.evict, self.transfer, self.give_up]
        )()  # fmt: skip
        self.cache.check_integrity()

    def arrive(self) -> None:
        if len(self.leased) < 3:
            chunk = self.random.choice([None, 2, 4, 7])
            reserve = self.random.choice([0, 1, 5])
            self.leased.append(self.server.begin(self.tokens(), reserve, chunk))

    def ask(self) -> None:
        if not self.leased:
            return
        request = self.random.choice(self.leased)
        decision = self.cache.admit(request)
        self.outcomes[decision.outcome] += 1
        if decision.admitted:
            self.leased.remove(request)
            self.running.append(request)
            self.cache.load_back(request)
        elif decision.outcome is Outcome.NEVER_FITS:
            self.leased.remove(request)
            self.cache.abort(request)

    def go_on(self) -> None:
        ready = [each for each in self.running if each.ready]
        if not ready:
            return
        request = self.random.choice(ready)
        if request.load_failed:
            self.cache.restart(request)
            self.running.remove(request)
            self.leased.append(request)
            return
        if request.computed < request.prompt:
            promised = self.server.promised_chunk(request)
            given = self.cache.next_chunk(request)
            assert given == promised, f"{given} of {promised} promised tokens"
            self.server.step(request, given)
        elif request.computed < request.total:
            self.server.decode(request, 1)
        if request.computed and self.random.random() < 0.3:
            self.cache.checkpoint(request)

    def end(self) -> None:
        done = [each for each in self.running if each.computed >= each.prompt]
        if done:
            request = self.random.choice(done)
            self.running.remove(request)
            cached = self.cache.finish(request)
            if 0 < cached < 20:
                self.finished.append(request.key.tokens()[:cached].tolist())

    def give_up(self) -> None:
        if self.random.random() < 0.3:
            everybody = self.leased + self.running
            if everybody:
                request = self.random.choice(everybody)
                (self.leased if request in self.leased else self.running).remove(request)
                self.cache.abort(request)

    def evict(self) -> None:
        if self.random.random() < 0.5:
            self.server.empty_device()
        else:
            component = self.random.choice(self.cache.tree.components)
            self.cache.evict(component.name, self.random.randint(1, component.device.capacity))

    def transfer(self) -> None:
        while self.engine.pending and self.random.random() < 0.8:
            index = self.random.randrange(len(self.engine.pending))
            if self.random.random() < 0.1:
                self.engine.fail(index)
            else:
                self.engine.step(index)
        self.cache.poll()

    def settle(self) -> None:
        """Let every transfer end."""
        self.engine.run_all()
        self.cache.poll()

    def run_to_the_end(self) -> None:
        """Everybody admitted runs to the end of its reservation and finishes."""
        for request in list(self.running):
            self.settle()
            self.running.remove(request)
            if request.load_failed:
                self.cache.abort(request)
                continue
            self.server.prefill(request)
            self.server.decode(request, request.total - request.computed)
            self.cache.finish(request)
            self.cache.check_integrity()
        self.settle()
