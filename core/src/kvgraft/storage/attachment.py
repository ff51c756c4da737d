"""One backend in use: its workers, its breaker, its deadlines, and how it is let go."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvgraft.storage.backend import StorageBackend
from kvgraft.storage.breaker import Breaker
from kvgraft.storage.calls import BackendFailure, Calls
from kvgraft.storage.counters import Counters
from kvgraft.storage.limits import SupervisionLimits
from kvgraft.storage.status import TRANSIENT, Status
from kvgraft.storage.ticket import Job, Phase, StorageTicket
from kvgraft.storage.workers import Staging, WorkerPool

__all__ = ["Attachment", "Call"]

Call = Callable[[Job, Staging], "list[Status] | None"]
"""Carries out a job's keys; None if the job was over before."""

TRIAL, CLOSE = "trial", "close"


class Attachment:
    """Runs calls of one backend under deadlines; nothing here blocks.

    Args:
        backend: an open store, closed when it is detached.
        fingerprint: digest that data must carry.
        limits: bounds.
        counters: where to count.
        clock: seconds that only grow.

    Raises:
        ConfigError: the backend does not say what it can do.

    Attributes:
        calls: the backend's calls.
        breaker: whether it is asked at all.
        pool: its threads.
        detaching: the ticket of `detach`, once it was called.
        closed: whether it was let go of.
        last_error: the last thing that it did wrong, for people.
    """

    def __init__(
        self,
        backend: StorageBackend,
        fingerprint: bytes,
        limits: SupervisionLimits,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.calls = Calls(backend, fingerprint, clock)
        self.breaker = Breaker(
            limits.failure_limit, limits.cooldown_s, limits.cooldown_limit_s, clock
        )
        self.pool = WorkerPool(limits.n_workers, limits.max_abandoned, limits.batch_nbytes)
        self.detaching: StorageTicket | None = None
        self.closed = False
        self.last_error: str | None = None
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._order = itertools.count()
        self._lock = threading.Lock()
        self._due: list[tuple[float, int, Job]] = []
        self._at_work: set[Job] = set()
        self._polling = threading.Lock()
        self._close_job: Job | None = None
        self._close_queued = False

    # -- calls

    def submit(self, job: Job, call: Call) -> None:
        """Queue a job; with an open breaker it ends at once with DOWN."""
        if not self.breaker.lets_pass:
            job.settle([Status.DOWN] * job.n_keys)
            return
        self._start(job, lambda staging: self._run(job, call, staging))

    def poll(self) -> None:
        """Enforce deadlines, try a backend that failed again, go on detaching."""
        if not self._polling.acquire(blocking=False):
            return
        try:
            self._expire()
            if self.closed:
                return
            if self.detaching is not None:
                self._go_on_detaching()
            elif self.breaker.take_trial():
                self._try()
        finally:
            self._polling.release()

    def detach(self, ticket: StorageTicket, deadline_s: float) -> None:
        """End what is queued, then close the backend; the ticket's value is True if that worked."""
        self.detaching = ticket
        self._close_job = self._supervised(Job(ticket, CLOSE, (0, 0), self._clock() + deadline_s))
        self.poll()

    # -- on workers

    def _run(self, job: Job, call: Call, staging: Staging) -> None:
        if not self.breaker.lets_pass:
            job.settle([Status.DOWN] * job.n_keys)
        else:
            self._carry_out(job, call, staging)
        with self._lock:
            self._at_work.discard(job)

    def _carry_out(self, job: Job, call: Call, staging: Staging) -> None:
        try:
            statuses = call(job, staging)
        except BackendFailure as failure:
            error = str(failure)

            def note_failure(statuses: Sequence[Status]) -> None:
                self._note_error(job, error)
                self.breaker.fail()

            job.settle([Status.DOWN] * job.n_keys, note_failure)
            return
        if statuses is None:  # cancelled, or its deadline has passed
            job.settle([Status.TIMEOUT] * job.n_keys)
            return

        def note(statuses: Sequence[Status]) -> None:
            if TRANSIENT.isdisjoint(statuses):
                self.breaker.succeed()
            else:
                self.breaker.fail()

        if not job.settle(statuses, note):
            self._counters.add(f"{job.verb}.late")

    def _run_trial(self, job: Job) -> None:
        try:
            healthy = self.calls.ask(job, lambda backend: backend.healthy()) == (True,)
        except BackendFailure as failure:
            self._note_error(job, str(failure))
            healthy = False
        with self._lock:
            self._at_work.discard(job)
        job.settle([], lambda statuses: self.breaker.end_trial(healthy=healthy))

    def _run_close(self, job: Job) -> None:
        try:
            if self.calls.ask(job, lambda backend: backend.close()) is not None:
                job.answer(True)
        except BackendFailure as failure:
            self._note_error(job, str(failure))
        job.settle([], lambda statuses: self._let_go())

    # -- supervision

    def _start(self, job: Job, task: Callable[[Staging], None]) -> None:
        self._supervised(job)
        with self._lock:
            self._at_work.add(job)
        self.pool.submit(job, task)

    def _supervised(self, job: Job) -> Job:
        with self._lock:
            heapq.heappush(self._due, (job.deadline, next(self._order), job))
        return job

    def ticket(self, n_keys: int) -> StorageTicket:
        """A ticket whose deadlines are enforced here."""
        return StorageTicket(n_keys, self.poll, self._counters.add_statuses)

    def _note_error(self, job: Job, error: str) -> None:
        self.last_error = job.ticket.error = f"{job.verb}: {error}"
        self._counters.add(f"{job.verb}.errors")

    def _expire(self) -> None:
        now, busy = self._clock(), []
        while True:
            with self._lock:
                if not self._due or self._due[0][0] > now:
                    break
                entry = heapq.heappop(self._due)
            job = entry[2]
            if job.phase is Phase.RETURNED:
                continue
            known = job.settled
            if not job.give_up(partial(self._note_timeout, job)):
                busy.append(entry)
                continue
            if known:  # cancelled; its call hangs all the same
                self._note_timeout(job, ())
            with self._lock:
                self._at_work.discard(job)
            self._leave_behind(job)
        with self._lock:
            for entry in busy:
                heapq.heappush(self._due, entry)

    def _note_timeout(self, job: Job, statuses: Sequence[Status]) -> None:
        self._counters.add(f"{job.verb}.timeouts")
        if job.verb == TRIAL:  # one that no worker got to is over as well
            self.breaker.end_trial(healthy=False)
        elif job.phase is Phase.CALLING:
            self.breaker.fail()

    def _leave_behind(self, job: Job) -> None:
        if job.phase is Phase.CALLING and self.pool.abandon(job):
            self._counters.add("workers.abandoned")
        if not self.pool.n_live:
            self.breaker.trip()
        if job is self._close_job:
            # Whatever still runs has had its time; the backend is told as soon as a worker can.
            late = Job(self.ticket(0), CLOSE, (0, 0), job.deadline)
            self.pool.submit(late, lambda staging: self._run_close(late))
            self._let_go()

    def _try(self) -> None:
        if not self.pool.n_live:
            self.breaker.end_trial(healthy=False)
            return
        deadline = self._clock() + self._limits.deadline_s
        job = Job(self.ticket(0), TRIAL, (0, 0), deadline)
        self._counters.add("breaker.trials")
        self._start(job, lambda staging: self._run_trial(job))

    def _go_on_detaching(self) -> None:
        job = self._close_job
        with self._lock:
            waits = bool(self._at_work)
        if job is None or waits or self._close_queued or job.settled:
            return
        self._close_queued = True
        self.pool.submit(job, lambda staging: self._run_close(job))

    def _let_go(self) -> None:
        self.closed = True
        self.pool.close()
