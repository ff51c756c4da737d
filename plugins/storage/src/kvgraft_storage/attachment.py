"""One attached backend: its workers, its breakers, its deadlines, and its detachment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvgraft_storage.backend import StorageBackend
from kvgraft_storage.breaker import Access, Breaker, BreakerState
from kvgraft_storage.calls import BackendFailure, Calls
from kvgraft_storage.counters import Counters
from kvgraft_storage.fair_queue import Call, FairQueue, Task, TicketCalls
from kvgraft_storage.limits import SupervisionLimits
from kvgraft_storage.status import TRANSIENT, Status
from kvgraft_storage.ticket import Job, Phase, StorageTicket
from kvgraft_storage.workers import Staging, WorkerPool

__all__ = ["Attachment"]

TRIAL, CLOSE = "trial", "close"


class Attachment:
    """Runs calls of one backend under deadlines; nothing here blocks.

    Args:
        backend: an open store, closed when it is detached.
        fingerprint: digest that data must carry.
        limits: bounds.
        counters: where to count.
        clock: monotonic, in seconds.

    Raises:
        ConfigError: the backend does not give its capabilities.

    Attributes:
        calls: the backend's calls.
        breakers: whether it is called at all, for reads and for writes.
        pool: its threads.
        detaching: the ticket of `detach`, once it was called.
        closed: whether it was detached.
        last_error: the backend's last error, for people.
    """

    def __init__(
        self,
        backend: StorageBackend,
        fingerprint: bytes,
        limits: SupervisionLimits,
        counters: Counters,
        clock: Callable[[], float],
    ) -> None:
        self.calls = Calls(backend, fingerprint, clock, lend_memory=limits.lend_memory)
        bounds = (limits.failure_limit, limits.cooldown_s, limits.cooldown_limit_s)
        self.breakers = {access: Breaker(*bounds, clock, access) for access in Access}
        self.detaching: StorageTicket | None = None
        self.closed = False
        self.last_error: str | None = None
        self._limits = limits
        self._counters = counters
        self._clock = clock
        self._queue = FairQueue()
        self._trials: dict[Job, list[Breaker]] = {}
        self._polling = threading.Lock()
        self._entry = threading.Lock()  # nothing is queued after `detach`
        self._close_job: Job | None = None
        self._close_queued = False
        self.pool = WorkerPool(
            self._queue, self._bound, limits.n_workers, limits.max_abandoned, limits.batch_nbytes
        )

    @property
    def state(self) -> BreakerState:
        """The stricter of the two breakers' states."""
        states = {breaker.state for breaker in self.breakers.values()}
        for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
            if state in states:
                return state
        return BreakerState.CLOSED

    # -- calls

    def submit(self, calls: TicketCalls) -> None:
        """Queue a ticket's calls; with an open breaker they end at once with DOWN."""
        with self._entry:
            if self.detaching is not None or not self.breakers[calls.access].lets_pass:
                calls.give_up(Status.DOWN)
            elif not calls.over:
                calls.waits_until = self._clock() + self._limits.queue_timeout_s
                self._queue.put(calls)

    def poll(self) -> None:
        """Enforce deadlines, retry a failed backend, go on detaching."""
        if not self._polling.acquire(blocking=False):
            return
        try:
            self._expire()
            if self.closed:
                return
            if self.detaching is not None:
                self._go_on_detaching()
                return
            due = [breaker for breaker in self.breakers.values() if breaker.take_trial()]
            if due:
                self._try(due)
        finally:
            self._polling.release()

    def detach(self, deadline_s: float) -> StorageTicket:
        """End queued calls, then close the backend; the ticket's value is True if that worked."""
        with self._entry:
            if self.detaching is None:
                ticket = self.ticket(0)
                deadline = self._clock() + deadline_s
                self._close_job = Job(ticket, CLOSE, (0, 0), access=Access.WRITE, deadline=deadline)
                self.detaching = ticket
            ticket = self.detaching
        self.poll()
        return ticket

    # -- on workers

    def _bound(self, job: Job, call: Call) -> Task:
        return partial(self._run, job, call)

    def _run(self, job: Job, call: Call, staging: Staging) -> None:
        if not self.breakers[job.access].lets_pass:
            job.settle([Status.DOWN] * job.n_keys)
        else:
            self._carry_out(job, call, staging)
        if job.calls is not None:
            job.calls.waits_until = self._clock() + self._limits.queue_timeout_s

    def _carry_out(self, job: Job, call: Call, staging: Staging) -> None:
        try:
            statuses = call(job, staging)
        except BackendFailure as failure:
            error = str(failure)

            def note_failure(statuses: Sequence[Status]) -> None:
                self.note_failure(job, error)

            job.settle([Status.DOWN] * job.n_keys, note_failure)
            return
        if statuses is None:  # cancelled, or its deadline has passed
            job.settle([Status.TIMEOUT] * job.n_keys)
            return

        def note(statuses: Sequence[Status]) -> None:
            if TRANSIENT.isdisjoint(statuses):
                self.breakers[job.access].succeed(job.asks)
            else:
                self.breakers[job.access].fail(job.asks)

        if not job.settle(statuses, note):
            self._counters.add(f"{job.verb}.late")

    def note_failure(self, job: Job, error: str) -> None:
        """A call of a job failed."""
        self._note_error(job, error)
        self.breakers[job.access].fail(job.asks)

    def _run_trial(self, job: Job) -> None:
        try:
            healthy = self.calls.ask(job, lambda backend: backend.healthy()) == (True,)
        except BackendFailure as failure:
            self._note_error(job, str(failure))
            healthy = False
        job.settle([], lambda statuses: self._end_trial(job, healthy=healthy))

    def _run_close(self, job: Job) -> None:
        try:
            if self.calls.ask(job, lambda backend: backend.close()) is not None:
                job.answer(True)
        except BackendFailure as failure:
            self._note_error(job, str(failure))
        job.settle([], lambda statuses: self._let_go())

    # -- supervision

    def ticket(self, n_keys: int) -> StorageTicket:
        """A ticket whose deadlines are enforced here."""
        return StorageTicket(n_keys, self.poll, self._counters.add_statuses)

    def _note_error(self, job: Job, error: str) -> None:
        self.last_error = job.ticket.error = f"{job.asks}: {error}"
        self._counters.add(f"{job.asks}.errors")

    def _expire(self) -> None:
        now = self._clock()
        close = [] if self._close_job is None or self._close_job.settled else [self._close_job]
        for job in {*self._queue.running(), *close}:
            if job.deadline > now or job.phase is Phase.RETURNED:
                continue
            known = job.settled
            if not job.give_up(partial(self._note_timeout, job)):
                continue  # the caller's memory is in use this moment
            if known:  # cancelled; its call hangs all the same
                self._note_timeout(job, ())
            self._queue.done(job)
            self._leave_behind(job)
        for calls in self._queue.expired(now):
            if calls.give_up(Status.TIMEOUT):
                calls.ticket.error = f"{calls.verb}: {self._limits.queue_timeout_s:g} s in line"
                self._counters.add(f"{calls.verb}.waited_too_long")
        for access, breaker in self.breakers.items():
            if not breaker.lets_pass:
                for calls in self._queue.clear(access):
                    calls.give_up(Status.DOWN)

    def _note_timeout(self, job: Job, statuses: Sequence[Status]) -> None:
        self._counters.add(f"{job.verb}.timeouts")
        if job.verb == TRIAL:  # one that no worker got to is over as well
            self._end_trial(job, healthy=False)
        elif job.phase is Phase.CALLING:
            self.breakers[job.access].fail(job.asks)

    def _leave_behind(self, job: Job) -> None:
        if job.phase is Phase.CALLING and self.pool.abandon(job):
            self._counters.add("workers.abandoned")
        if not self.pool.n_live:
            for breaker in self.breakers.values():
                breaker.trip()
        if job is self._close_job:
            # Calls that still run have had their time; the backend learns it as soon as a worker
            # can.
            late = Job(self.ticket(0), CLOSE, (0, 0), access=Access.WRITE)
            self._queue.put_first(late, lambda staging: self._run_close(late))
            self._let_go()

    def _try(self, due: list[Breaker]) -> None:
        if not self.pool.n_live:
            for breaker in due:
                breaker.end_trial(healthy=False)
            return
        deadline = self._clock() + self._limits.deadline_s
        job = Job(self.ticket(0), TRIAL, (0, 0), access=Access.READ, deadline=deadline)
        self._trials[job] = due
        self._counters.add("breaker.trials")
        self._queue.put_first(job, lambda staging: self._run_trial(job))

    def _end_trial(self, job: Job, *, healthy: bool) -> None:
        for breaker in self._trials.pop(job, ()):
            breaker.end_trial(healthy=healthy)

    def _go_on_detaching(self) -> None:
        job = self._close_job
        if job is None or self._close_queued or job.settled or not self._queue.idle:
            return
        self._close_queued = True
        self._queue.put_first(job, lambda staging: self._run_close(job))

    def _let_go(self) -> None:
        self.closed = True
        for access in Access:
            for calls in self._queue.clear(access):
                calls.give_up(Status.DOWN)
        self.pool.close()
