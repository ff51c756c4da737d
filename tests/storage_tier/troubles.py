"""A store that goes wrong in every way, a clock that tests move, and traffic over both."""

from __future__ import annotations

import enum
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from kvgraft import Tier, TokenKey
from kvgraft.cache import Cache
from kvgraft_storage import BreakerState, Status, StorageBackend, Value
from kvgraft_storage.settings import StorageSettings
from kvgraft_storage.tier import Prefetch, StorageTier
from kvgraft_testing.storage import MemoryBackend

from ..serving.server import Server, ledgers
from ..serving.setups import Setup
from .shelf import tier_of

__all__ = [
    "DEADLINE_S",
    "PROMPTS",
    "VERBS",
    "Clock",
    "Traffic",
    "Trouble",
    "Troubled",
    "traffic_over",
]

T = TypeVar("T")
VERBS = ("exists", "get", "set")


class Trouble(str, enum.Enum):
    """Faults of a call, instead of its work."""

    HANGS = "hangs"
    """Until the store is healed."""
    RAISES = "raises"
    NONSENSE = "nonsense"
    """Returns a value that no backend may return."""
    LIES = "lies"
    """The opposite, or success with nothing done."""
    SLOW = "slow"
    """Answers when the deadline has just passed."""


class Clock:
    """Time that moves only when a test adds to it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Troubled(MemoryBackend):
    """Works, except the verbs in `faults`.

    Attributes:
        faults: by verb.
        stuck: calls that hang now, none of them once the store is healed.
        n_calls: by verb.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.faults: dict[str, Trouble] = {}
        self._hanging: Counter[str] = Counter()
        self.n_calls: Counter[str] = Counter()
        self._clock = clock
        self._healed = threading.Condition()

    @property
    def stuck(self) -> int:
        return sum(self._hanging[verb] for verb in self.faults)

    def heal(self) -> None:
        """Everything works again, and hanging calls go on."""
        with self._healed:
            self.faults.clear()
            self._healed.notify_all()

    def exists(self, keys: Sequence[bytes]) -> Sequence[bool]:
        return self._call(
            "exists",
            lambda: super(Troubled, self).exists(keys),
            lambda told: [not each for each in told],
        )

    def get_into(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        return self._call(
            "get",
            lambda: super(Troubled, self).get_into(keys, values, deadline_s),
            lambda told: [_scribbled(value) for value in values],
        )

    def set_from(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> Sequence[Status]:
        if self.faults.get("set") is Trouble.LIES:
            self.n_calls["set"] += 1
            return [Status.OK] * len(keys)
        return self._call(
            "set", lambda: super(Troubled, self).set_from(keys, values, deadline_s), list
        )

    def healthy(self) -> bool:
        return self._call("healthy", super().healthy, lambda told: not told)

    def close(self) -> None:
        self._call("close", lambda: None, lambda told: told)

    def _call(self, verb: str, work: Callable[[], T], lie: Callable[[T], T]) -> T:
        fault = self.faults.get(verb)
        self.n_calls[verb] += 1
        if fault is Trouble.RAISES:
            raise OSError(f"{verb} has failed")
        if fault is Trouble.NONSENSE:
            return [None, "yes", 7]  # type: ignore[return-value]
        if fault is Trouble.HANGS:
            with self._healed:
                self._hanging[verb] += 1
                self._healed.wait_for(lambda: verb not in self.faults)
                self._hanging[verb] -= 1
        if fault is Trouble.SLOW:
            self._clock.now += DEADLINE_S + 0.001
        told = work()
        return lie(told) if fault is Trouble.LIES else told


def _scribbled(value: Value) -> Status:
    """Data that was never stored, handed out as if it were whole."""
    value.payload[: len(value.payload)] = bytes([7]) * len(value.payload)
    return Status.OK


DEADLINE_S = 5.0
"""By the test's clock."""
PATIENCE_S = 60.0
"""By the machine's: what takes longer never comes."""
PROMPTS = [
    [*range(100, 121)],
    [*range(100, 112), *range(300, 311)],
    [*range(100, 121), *range(400, 409)],
    [*range(500, 533)],
    [*range(600, 607)],
]


class Traffic:
    """Requests on a cache that is too small for them, and faults meanwhile.

    Every byte read is compared with the computed one (`Server.read`), and every step may be
    looked at with `check`.
    """

    def __init__(
        self, cache: Cache, backend: StorageBackend | None, clock: Clock, chance: random.Random
    ) -> None:
        self.cache, self.backend, self.clock, self.chance = cache, backend, clock, chance
        self.server = Server(cache)
        self.before = ledgers(cache)
        self.queued: list[Prefetch] = []
        self.served = 0
        self.gained = 0

    @property
    def tier(self) -> StorageTier:
        return tier_of(self.cache)

    # -- events

    def queue(self) -> None:
        """A request arrives; its data is looked for in the store."""
        self.queued.append(self.tier.prefetch(TokenKey(self.chance.choice(PROMPTS))))

    def begin(self) -> None:
        """The oldest request runs as soon as its policy lets it."""
        if not self.queued:
            self.queue()
        prefetch = self.queued.pop(0)
        self.let_time_pass(lambda: prefetch.ready)
        self.run(prefetch.key, prefetch)

    def cancel(self) -> None:
        if self.queued:
            self.tier.cancel(self.queued.pop(self.chance.randrange(len(self.queued))))

    def evict(self) -> None:
        for component in self.cache.tree.components:
            for tier in (Tier.DEVICE, Tier.HOST):
                if self.chance.random() < 0.6:
                    self.cache.evict(component.name, self.chance.randrange(1, 20), tier)

    def poll(self) -> None:
        self.cache.poll()
        self.clock.now += self.chance.choice([0.0, 0.5, 2.0])

    # -- parts

    def run(self, key: TokenKey, prefetch: Prefetch | None = None) -> None:
        """A request's whole life; a cache too small for it defers it, and it is given up."""
        cache = self.cache
        request = cache.begin(key, prefetch=prefetch)
        self.gained += request.storage_tokens
        if cache.admit(request).admitted:
            self.server.load_back(request)
            self.server.prefill(request)
            cache.finish(request)
            self.served += 1
        else:
            cache.abort(request)

    def serve(self, tokens: Sequence[int]) -> int:
        """Prefetch, wait for it, run; the tokens that came from the store."""
        prefetch = self.tier.prefetch(TokenKey(tokens))
        self.let_time_pass(lambda: prefetch.ended)
        self.run(prefetch.key, prefetch)
        return prefetch.gained_tokens

    def let_time_pass(self, until: Callable[[], object]) -> None:
        """Poll until something is so; the clock goes on where only that helps.

        While no call hangs the clock stands still: a call is never late because its thread is.
        """
        end = time.monotonic() + PATIENCE_S
        while not until():
            assert time.monotonic() < end, self.tier.counts()
            self.cache.poll()
            if isinstance(self.backend, Troubled) and self.backend.stuck:
                self.clock.now += 1.0
            time.sleep(0.0003)

    def settle(self) -> None:
        """Everything under way ends."""
        self.let_time_pass(lambda: not self.tier.n_in_flight)
        assert self.cache.journal.drain(60)
        self.let_time_pass(lambda: not self.tier.n_in_flight)

    def empty(self) -> None:
        """Evict everything, with time for the copies and writes of eviction."""
        self.settle()
        for tier in (Tier.DEVICE, Tier.HOST):
            for component in self.cache.tree.components:
                self.cache.evict(component.name, 10_000, tier)
            self.settle()

    @staticmethod
    def key(tokens: Iterable[int]) -> TokenKey:
        return TokenKey(tokens)

    def check(self) -> None:
        self.cache.check_integrity()

    def finish(self) -> None:
        """All is given back, and every prefetch was accounted for."""
        while self.queued:
            self.cancel()
        self.empty()
        self.check()
        tier = self.tier
        assert tier.prefetching.nbytes_in_flight == tier.storing.nbytes_in_flight == 0
        assert ledgers(self.cache) == self.before
        counts = tier.counts()
        ended = counts.get("prefetch delivered", 0) + counts.get("prefetch in vain", 0)
        assert ended == counts.get("prefetch started", 0), counts

    def recover(self) -> None:
        """With nobody's help but time's: the store is asked again, and used."""
        storage, end = self.tier.client, time.monotonic() + PATIENCE_S
        if isinstance(self.backend, Troubled):
            self.backend.heal()
        self.let_time_pass(lambda: not (storage.n_abandoned or self.tier.n_in_flight))
        while storage.state is not BreakerState.CLOSED:
            assert time.monotonic() < end, self.tier.counts()
            self.clock.now += 61.0
            self.cache.poll()
            self.let_time_pass(lambda: storage.state is not BreakerState.HALF_OPEN)
        self.cache.poll()
        self.empty()
        prompt = [9000 + self.chance.randrange(1000), *range(8000, 8008)]
        for _ in range(2):
            self.serve(prompt)
            self.settle()
        self.empty()
        prefetch = self.tier.prefetch(TokenKey(prompt))
        self.let_time_pass(lambda: prefetch.ended)
        assert prefetch.gained_tokens == 8, (prefetch, self.tier.counts(), storage.last_error)
        self.run(prefetch.key, prefetch)


@contextmanager
def traffic_over(
    setup: Setup,
    settings: StorageSettings,
    backend: Callable[[Clock], StorageBackend],
    seed: int = 0,
    **options: object,
) -> Iterator[Traffic]:
    """Traffic on a cache over a store; the tier goes by the test's clock."""
    cache = setup.open(storage=settings, **options)  # type: ignore[arg-type]
    clock = Clock()
    cache.storage = cache.tier = StorageTier(
        cache.tree, cache.mounted, cache.evictor, settings, clock
    )
    store = backend(clock)
    cache.storage.attach(store)
    traffic = Traffic(cache, store, clock, random.Random(seed))
    try:
        yield traffic
    finally:
        if isinstance(store, Troubled):
            store.heal()
        cache.close()
