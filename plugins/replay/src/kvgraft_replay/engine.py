"""A serving engine without a model: continuous batching on a virtual clock.

Every step admits requests that fit, prefills up to a chunk of tokens, decodes for the duration of
the prefill, and advances the clock. Two rates give the durations, so a replay is repeatable. The
cache is the real one, with real pools and real copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvgraft.admission import Decision, Outcome
from kvgraft.cache import Cache
from kvgraft.errors import ContractViolation, IntegrityError, KvgraftError, TransferError
from kvgraft.requests.request import Request
from kvgraft_replay.arrivals import Arrivals
from kvgraft_replay.fetching import Fetching
from kvgraft_replay.hits import hits_of
from kvgraft_replay.meter import Meter
from kvgraft_replay.running import Job, Player
from kvgraft_replay.totals import Totals
from kvgraft_scheduling.waiting import WaitingPlace, WaitingQueue

__all__ = ["EngineModel", "ReplayEngine"]

MOST_WAITS = 16
"""How often an idle engine waits for the slots of a deferred request."""


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The speed of the simulated engine.

    Attributes:
        prefill_tokens_s: prompt tokens computed per second, all requests together.
        decode_tokens_s: output tokens per second of each running request.
        chunk_tokens: most prompt tokens computed in one step.
        max_running: most requests running at a time.
        reserve_tokens: decode tokens that admission keeps slots for, at most the request's output.
        hints: whether it gives the cache the trace's hints about a session's future.
        announce: whether it announces waiting requests to the cache.
    """

    prefill_tokens_s: float = 100_000.0
    decode_tokens_s: float = 100.0
    chunk_tokens: int = 8192
    max_running: int = 256
    reserve_tokens: int = 512
    hints: bool = True
    announce: bool = False


class ReplayEngine:
    """Plays arrivals against a cache.

    Args:
        cache: the cache.
        arrivals: the source of requests.
        model: the speed.
        player: stamps and verifies payloads.
        meter: measures the cache's calls.
        on_count: called with each request whose part of the totals began or changed.
        on_end: called with each request that ended.
    """

    def __init__(
        self,
        cache: Cache,
        arrivals: Arrivals,
        model: EngineModel,
        player: Player,
        meter: Meter,
        *,
        on_count: Callable[[Job], None],
        on_end: Callable[[], None],
    ) -> None:
        self.cache = cache
        self.arrivals = arrivals
        self.model = model
        self.player = player
        self.meter = meter
        self.on_count = on_count
        self.on_end = on_end
        self.totals = Totals()
        self.now_s = 0.0
        self.fetching = Fetching(cache, meter)
        self.waiting: WaitingQueue[Job] = WaitingQueue()
        self.loading: list[Job] = []
        self.prefilling: list[Job] = []
        self.decoding: list[Job] = []
        self.after_step: Callable[[], object] = lambda: None
        self.before_clock: Callable[[float], object] = lambda to_s: None
        self._stalled = False

    @property
    def n_running(self) -> int:
        """Requests admitted and not ended."""
        return len(self.loading) + len(self.prefilling) + len(self.decoding)

    def run(self) -> None:
        """Play until nothing is left to arrive, wait or run."""
        while True:
            for trace in self.arrivals.take(self.now_s):
                self.fetching.enter(self.player.job(trace))
                self._stalled = False
            if not self.waiting and not self.n_running and self.fetching:
                self.fetching.wait()
            elif not self.waiting and not self.n_running:
                due = self.arrivals.next_s()
                if due is None:
                    return
                self._move_clock(due)
                continue
            self.step()

    def step(self) -> None:
        """One scheduler step.

        Copies are acknowledged at two points only, by waiting for all of them, so a replay does not
        depend on the speed of threads.
        """
        self.meter.run("poll", None, self.fetching.settle)
        self._start_loaded()
        for job in self.fetching.leave():
            self._announce(job, self.waiting.append(job))
            self._stalled = False
        self._admit()
        self.meter.run("poll", None, self.fetching.settle)
        self._start_loaded()
        prefilled = self._prefill()
        duration = prefilled / self.model.prefill_tokens_s
        if not prefilled:
            duration = self._idle_duration()
        self._decode(duration)
        self._move_clock(self.now_s + duration)
        self._check_ledgers()
        self.after_step()

    def _move_clock(self, to_s: float) -> None:
        if to_s > self.now_s:
            self.before_clock(to_s)
            self.now_s = to_s

    def _idle_duration(self) -> float:
        """Duration of a step without prefill: a page of decode, or until the next arrival."""
        page_s = self.cache.config.page_size / self.model.decode_tokens_s
        due = self.arrivals.next_s()
        if due is not None and due > self.now_s and not self._stalled:
            return min(page_s, due - self.now_s)
        return page_s

    # -- waiting

    def _announce(self, job: Job, place: WaitingPlace[Job]) -> None:
        if self.model.announce:
            job.announcement = self.meter.run(
                "announce",
                job.trace.index,
                lambda: self.cache.announce(job.key, place=place.arrived),
            )

    def _put_back(self, job: Job) -> None:
        self.waiting.put_back(job.place)
        self._announce(job, job.place)
        self._stalled = False

    # -- admission

    def _admit(self) -> None:
        """Admit requests that fit; if nothing runs, wait for the copies that hold room."""
        if self._stalled:
            return
        deferred, waits = self._round(), 0
        while deferred is not None and not self.n_running:
            waits += 1
            if waits > MOST_WAITS or not any(deferred.waits_for or ()):
                raise ContractViolation(
                    "A8", None, f"an idle cache, asked {waits} times: {deferred}"
                )
            self.cache.drain()
            if self.cache.journal.n_in_flight:
                raise TransferError(
                    f"copies did not end in {self.cache.config.transfer_timeout_s:g} s: {deferred}"
                )
            self.cache.poll()
            deferred = self._round()
        self._stalled = deferred is not None

    def _round(self) -> Decision | None:
        """Try the requests at the head of the queue; returns the first deferral, None for none."""
        deferred: Decision | None = None
        for job in self.waiting.round():
            if self.n_running >= self.model.max_running:
                return None
            request = self._begin(job)
            decision = self.meter.run("admit", job.trace.index, self.cache.admit, request)
            if decision.outcome is Outcome.DEFERRED:
                self.totals.deferrals += 1
                self.fetching.deferred(job, request)
                self.meter.run("finish", job.trace.index, self.cache.abort, request)
                deferred = deferred or decision
                continue
            job.left = self.waiting.take(job)
            if job.announcement is not None:
                self.meter.run("announce", job.trace.index, job.announcement.withdraw)
            if decision.outcome is Outcome.NEVER_FITS:
                self.totals.rejections += 1
                self.totals.first_rejection = self.totals.first_rejection or str(decision)
                self.totals.first_problem = self.totals.first_problem or str(decision)
                self.meter.run("finish", job.trace.index, self.cache.abort, request)
                self._unserved(job)
                continue
            self._admitted(job, request)
        return deferred

    def _begin(self, job: Job) -> Request:
        left = job.trace.output_tokens - job.decoded
        return self.meter.run(
            "match",
            job.trace.index,
            lambda: self.fetching.begin(
                job,
                reserve=min(left, self.model.reserve_tokens),
                chunk=self.model.chunk_tokens,
            ),
        )

    def _admitted(self, job: Job, request: Request) -> None:
        self.totals.admissions += 1
        job.request = request
        self._matched(job, request)
        try:
            self.meter.run("load_back", job.trace.index, self.cache.load_back, request)
        except ContractViolation:
            raise
        except KvgraftError as error:
            self._out_of_memory(job, str(error))
            return
        self.loading.append(job)

    def _matched(self, job: Job, request: Request) -> None:
        """Count where a request's prefix was; tokens lost since its first match are not saved."""
        if job.hits is None:
            hits = hits_of(self.cache, request, job.fetched)
            self.totals.count(job)
            self.totals.count_hits(job, hits)
        else:
            self.totals.count_again(job, request.anchor_tokens)
        self.on_count(job)

    def _start_loaded(self) -> None:
        waiting, self.loading = self.loading, []
        for job in waiting:
            request = job.running
            if not request.ready:
                self.loading.append(job)
            elif request.load_failed:
                self.cache.abort(request)
                job.request = None
                self._put_back(job)
            else:
                self.prefilling.append(job)
                self.player.verify_prefix(job)

    # -- computing

    def _prefill(self) -> int:
        budget = self.model.chunk_tokens
        done = 0
        for job in list(self.prefilling):
            if done >= budget:
                break
            request = job.running
            while done < budget and request.computed < request.prompt:
                tokens = self.cache.next_chunk(request, min(request.chunk, budget - done))
                if not tokens:
                    break
                started = request.computed
                if not self._setup(job, tokens):
                    break
                done += request.computed - started
                self.meter.run("checkpoint", job.trace.index, self.cache.checkpoint, request)
            if job.request is None:
                continue
            if request.computed >= request.prompt:
                self.prefilling.remove(job)
                self.decoding.append(job)
        return done

    def _setup(self, job: Job, tokens: int) -> bool:
        """Compute a chunk; a prefill without its promised room counts as out of memory."""
        fresh = job.running.computed == job.running.anchor_tokens
        try:
            if fresh:
                self.meter.run("allocate", job.trace.index, self.cache.allocate, job.running, 0)
                self.player.verify_states(job)
            if self.player.compute(job, tokens):
                return True
        except ContractViolation:
            raise
        except KvgraftError as error:
            self._out_of_memory(job, str(error))
            return False
        self._out_of_memory(job, f"no room for a chunk of {tokens} tokens that was admitted")
        return False

    def _decode(self, duration: float) -> None:
        for job in list(self.decoding):
            if job.request is None:
                continue
            job.credit += duration * self.model.decode_tokens_s
            tokens = min(int(job.credit), job.trace.output_tokens - job.decoded - job.held)
            job.credit -= tokens
            job.held += tokens
            if self._advance(job) and job.decoded >= job.trace.output_tokens:
                self._finish(job)

    def _advance(self, job: Job) -> bool:
        """Decode the held tokens page by page; False if the job was retracted.

        The first tokens of a page are computed at once, because they take its slots. The cache sees
        the others when the page is full or the last token has come.
        """
        page_size = self.cache.config.page_size
        while job.held:
            filled = job.running.computed % page_size
            step = min(job.held, page_size - filled)
            is_inside = 0 < filled < page_size - step
            if is_inside and job.decoded + step < job.trace.output_tokens:
                return True
            if not self._decode_held(job, step):
                return False
        return True

    def _decode_held(self, job: Job, n_tokens: int) -> bool:
        """Decode held tokens, of at most one page; False if the job was retracted."""
        position = job.running.computed
        job.key.extend(job.tokens[position : position + n_tokens])
        while not self.player.compute(job, n_tokens):
            if not self._retract_for(job):
                return False
        job.decoded += n_tokens
        job.held -= n_tokens
        return True

    def _retract_for(self, job: Job) -> bool:
        """Retract the request that arrived last; False if that is the asking one."""
        running = [each for each in (*self.decoding, *self.prefilling) if each.request is not None]
        victim = max(running, key=lambda each: each.place.arrived)
        if victim is not job and victim.held:
            self._decode_held(victim, victim.held)
        victim.held = 0
        self.totals.count_retracted(victim)
        self.meter.run("finish", victim.trace.index, self.cache.retract, victim.running)
        victim.key.truncate(victim.trace.prompt_tokens + victim.decoded)
        victim.request = None
        for jobs in (self.decoding, self.prefilling):
            if victim in jobs:
                jobs.remove(victim)
        self._put_back(victim)
        return victim is not job

    def _finish(self, job: Job) -> None:
        self.player.verify_prefix(job)
        self.totals.served += 1
        self.totals.computed.append(job.trace.prompt_tokens - (job.hits.tokens if job.hits else 0))
        self.totals.output_tokens += job.trace.output_tokens
        hint = job.trace.hint if self.model.hints else None
        self.meter.run("finish", job.trace.index, self.cache.finish, job.running, None, hint)
        job.request = None
        self.decoding.remove(job)
        self._end(job)

    def _unserved(self, job: Job) -> None:
        """A request ends without being served: nothing of its prompt was saved."""
        self.totals.count_unserved(job)
        self.on_count(job)
        self._end(job)

    def _end(self, job: Job) -> None:
        self._stalled = False
        if job.unserved:
            self.meter.share(job.trace.index)
        else:
            self.meter.close(job.trace.index)
        self.arrivals.ended(job.trace, self.now_s)
        self.on_end()

    def _out_of_memory(self, job: Job, message: str) -> None:
        self.totals.out_of_memory += 1
        self.totals.first_problem = self.totals.first_problem or message
        self.cache.abort(job.running)
        job.request = None
        for jobs in (self.loading, self.prefilling, self.decoding):
            if job in jobs:
                jobs.remove(job)
        self._unserved(job)

    # -- checks

    def _check_ledgers(self) -> None:
        try:
            for component in self.cache.tree.components:
                component.device.check()
                if component.host is not None:
                    component.host.check()
        except IntegrityError as error:
            self._violation(str(error))

    def check_integrity(self) -> None:
        """Recompute all books; a violation is counted, not raised."""
        try:
            self.cache.check_integrity()
        except IntegrityError as error:
            self._violation(str(error))

    def _violation(self, message: str) -> None:
        self.totals.ledger_violations += 1
        self.totals.first_problem = self.totals.first_problem or message
