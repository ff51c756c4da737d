"""A schedule of random calls that is the same on every rank.

It chooses by its seed and by results that are equal on all ranks. Data is stamped as a replay does,
with the rank in it, and verified wherever a request resumes from it.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraft import Cache, TokenKey
from kvgraft.admission import Outcome
from kvgraft.errors import BudgetError
from kvgraft.requests.request import Request
from kvgraft_replay.meter import Meter
from kvgraft_replay.payload import PageDigests, Verify
from kvgraft_replay.running import Job, Player
from kvgraft_replay.workload import TraceRequest

__all__ = ["Play"]

FAMILIES, LONGEST, MOST = 6, 160, 6
PAGE = 4

WEIGHTS = {
    "begin": 8,
    "admit": 10,
    "run": 40,
    "poll": 25,
    "end": 4,
    "drop": 2,
    "evict": 1,
    "pin": 1,
    "clear": 0.2,
    "drain": 0.4,
}


class _Salted(PageDigests):
    """Digests with a rank in them: data of another rank's shard is wrong here."""

    def __init__(self, tokens: npt.NDArray[np.int32], rank: int) -> None:
        super().__init__(tokens, PAGE)
        self._rank = rank

    def pages(self, start: int, end: int) -> npt.NDArray[np.int64]:
        return super().pages(start, end) + self._rank

    def state(self, n_tokens: int) -> npt.NDArray[np.int64]:
        return super().state(n_tokens) + self._rank


class Play:
    """Plays a number of calls on this rank's cache.

    Attributes:
        hits: tokens that requests resumed from.
        n_calls: calls made.
        since_s: when the last one began.
        other: which argument of the next call that has it is another one, on this rank alone.
    """

    def __init__(self, cache: Cache, rank: int, seed: int) -> None:
        self.cache = cache
        self.rank = rank
        self.hits = self.n_calls = self.from_storage = 0
        self.since_s = time.monotonic()
        self.other = ""
        self._random = random.Random(seed)
        numbers = np.random.default_rng(seed)
        self._families = numbers.integers(0, 50, (FAMILIES, LONGEST)).astype(np.int32)
        self._player = Player(cache, Meter(), Verify.FULL, 0)
        self._jobs: list[Job] = []
        self._queued: list[tuple[Job, Any]] = []
        self._pins: list[Any] = []
        self._at_work: dict[int, bool] = {}

    @property
    def mismatches(self) -> int:
        """Slots with other bytes than those of the request's tokens."""
        return self._player.checks.mismatches

    def go(self, n_calls: int, trouble: dict[str, Any]) -> None:
        """Make that many random calls; `trouble` says what happens at which one on which rank."""
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        for number in range(n_calls):
            self.since_s = time.monotonic()
            if trouble.get("at") == number and trouble.get("rank") == self.rank:
                self._trouble(trouble["what"])
            name = self._random.choices(names, weights)[0]
            getattr(self, f"_{name}")()
            self.n_calls += 1
            if number % 500 == 499:
                self.cache.check_integrity()

    def end(self) -> None:
        """End all requests, and check that nothing is left."""
        for _, prefetch in self._queued:
            if prefetch is not None:
                self.cache.storage.cancel(prefetch)
        for job in self._jobs:
            self.cache.abort(job.running)
        self.cache.unpin_all("a test")
        self.cache.drain()
        self.cache.check_integrity()

    def _trouble(self, what: str) -> None:
        if what.startswith("other "):
            self.other = what.removeprefix("other ")
        elif what == "evict":
            plain: Any = type(self.cache).__mro__[1]
            plain.evict(self.cache, self.cache.mounted[0].name, 1)
        elif what == "call":
            self.cache.evict(self.cache.mounted[0].name, 1)
        else:
            os.kill(os.getpid(), getattr(signal, what))

    # -- calls

    def _begin(self) -> None:
        if len(self._jobs) + len(self._queued) >= MOST:
            return
        chosen = self._random
        family = self._families[chosen.randrange(FAMILIES)]
        shared = family[: chosen.randrange(1, LONGEST)]
        own = [chosen.randrange(50, 100) for _ in range(chosen.randrange(0, 40))]
        tokens = np.array([*shared.tolist(), *own], dtype=np.int32)
        n_output = chosen.randrange(0, 12)
        n_prompt = max(1, len(tokens) - n_output)
        namespace = chosen.choice([None, None, "tenant"])
        trace = TraceRequest(self.n_calls, 0, 0.0, 0.0, n_prompt, n_output, ())
        key = TokenKey(tokens[:n_prompt], namespace)
        job = Job(trace, tokens, _Salted(tokens, self.rank), key)
        prefetch = None
        if self.cache.storage and chosen.random() < 0.7:
            prefetch = self.cache.storage.prefetch(key)
        self._queued.append((job, prefetch))

    def _admit(self) -> None:
        ready = [each for each in self._queued if each[1] is None or each[1].ready]
        if ready:
            each = self._random.choice(ready)
            self._queued.remove(each)
            job, prefetch = each
            if prefetch is not None:
                self.from_storage += prefetch.gained_tokens
            reserve = len(job.tokens) - job.key.n_tokens
            if self.other == "key":
                job.key = TokenKey(job.key.tokens() + 1, job.key.namespace)
            if self.other == "namespace":
                job.key = TokenKey(job.key.tokens(), "of this rank")
            reserve += self.other == "reserve"
            job.request = self.cache.begin(job.key, reserve=reserve, chunk=32, prefetch=prefetch)
            self._jobs.append(job)
        for job in self._jobs:
            if job.running.stage.value == "leased":
                self._try(job)
                return

    def _try(self, job: Job) -> None:
        decision = self.cache.admit(job.running)
        if decision.outcome is Outcome.NEVER_FITS or (
            decision.outcome is Outcome.DEFERRED and self._random.random() < 0.3
        ):
            self._drop_job(job)
        elif decision.admitted:
            self.hits += job.running.anchor_tokens
            self.cache.load_back(job.running)
            self._at_work[id(job)] = False

    def _run(self) -> None:
        running = [job for job in self._jobs if id(job) in self._at_work and job.running.ready]
        if not running:
            return
        job = self._random.choice(running)
        request = job.running
        if request.load_failed:
            del self._at_work[id(job)]
            self.cache.restart(request)
            return
        if not self._at_work[id(job)]:
            self._at_work[id(job)] = True
            if not self.cache.allocate(request, 0):
                return
            self._player.verify_prefix(job)
            self._player.verify_states(job)
        if request.computed < request.prompt:
            n_tokens = self.cache.next_chunk(request, self._random.choice([4, 8, 32]))
        else:
            n_tokens = min(1, len(job.tokens) - request.computed)
        if not n_tokens:
            if request.computed >= len(job.tokens):
                self._finish(job)
            return
        self._compute(job, request, n_tokens)

    def _compute(self, job: Job, request: Request, n_tokens: int) -> None:
        start = request.computed
        if not self.cache.allocate(request, n_tokens):
            self._finish(job)
            return
        if job.key.n_tokens < start + n_tokens:
            job.key.extend(job.tokens[start : start + n_tokens] + (self.other == "token"))
        self._player._stamp(job, start, start + n_tokens)
        self.cache.computed(request, n_tokens)
        if self._random.random() < 0.5:
            self.cache.checkpoint(request)

    def _finish(self, job: Job) -> None:
        self.cache.finish(job.running)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        self._jobs.remove(job)
        self._at_work.pop(id(job), None)

    def _drop_job(self, job: Job) -> None:
        self.cache.abort(job.running)
        self._forget(job)

    def _end(self) -> None:
        running = [job for job in self._jobs if self._at_work.get(id(job))]
        if running:
            self._finish(self._random.choice(running))

    def _drop(self) -> None:
        if self._jobs:
            self._drop_job(self._random.choice(self._jobs))

    def _poll(self) -> None:
        self.cache.poll()

    def _drain(self) -> None:
        self.cache.drain()

    def _evict(self) -> None:
        name = self._random.choice([each.name for each in self.cache.mounted])
        self.cache.evict(name, self._random.randrange(1, 20))

    def _pin(self) -> None:
        if self._pins and self._random.random() < 0.5:
            self.cache.unpin(self._pins.pop())
            return
        family = self._families[self._random.randrange(FAMILIES)]
        try:
            self._pins.append(self.cache.pin(TokenKey(family), owner="a test"))
        except BudgetError:
            return

    def _clear(self) -> None:
        self.cache.clear(self._random.choice([None, "tenant"]))
