"""The queue of calls for workers: fair between tickets, and between reads and writes.

    reads    ticket A: [call call call]   ticket B: [call]        round robin in each row,
    writes   ticket C: [call call]                                the rows in turn

A ticket is cut into calls while it is served, so a waiting ticket costs no more memory than itself.
Waiting has a bound of its own, counted from the last call of the ticket that was served: a slow
store still serves every ticket, and slowness is no failure.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvgraft_storage.breaker import Access
from kvgraft_storage.status import Status
from kvgraft_storage.ticket import Job, StorageTicket

if TYPE_CHECKING:
    from kvgraft_storage.workers import Staging

__all__ = ["Call", "FairQueue", "Task", "TicketCalls"]

Call = Callable[[Job, "Staging"], "list[Status] | None"]
"""Carries out a job's keys; None if the job was over before."""

Task = Callable[["Staging"], None]
"""Carries out one job; must not raise."""


class TicketCalls:
    """The calls of one ticket, in the order of its keys.

    Args:
        ticket: whose.
        verb: the operation, for the counters.
        access: whether that reads or writes.
        batches: ranges of keys per call, half-open; taken one by one.
        call: runs one of them.
        deadline_s: longest time for one call, from when it begins.

    Attributes:
        waits_until: when it is given up unless one of its calls is served before.
    """

    __slots__ = (
        "_batches",
        "_next",
        "access",
        "call",
        "deadline_s",
        "ticket",
        "verb",
        "waits_until",
    )

    def __init__(
        self,
        ticket: StorageTicket,
        verb: str,
        access: Access,
        batches: Iterator[tuple[int, int]],
        call: Call,
        deadline_s: float,
    ) -> None:
        self.ticket = ticket
        self.verb = verb
        self.access = access
        self.call = call
        self.deadline_s = deadline_s
        self.waits_until = 0.0
        self._batches = batches
        self._next = next(batches, None)
        if self._next is not None:
            ticket.queue(self)

    @property
    def over(self) -> bool:
        """Whether no call is left."""
        return self._next is None

    def take(self) -> Job | None:
        """The next call; None if the ticket was cancelled or given up."""
        with self.ticket.changing():
            if self._next is None or self.ticket.cancelled:
                return None
            job = Job(self.ticket, self.verb, self._next, access=self.access, calls=self)
            self._next = next(self._batches, None)
            if self._next is None:
                self.ticket.leave()
            return job

    def give_up(self, status: Status) -> bool:
        """End calls that have not begun; false if there are none."""
        with self.ticket.changing():
            if self._next is None:
                return False
            first, self._next = self._next[0], None
            self.ticket.settle_rest(self.verb, first, status)
            return True


class FairQueue:
    """The queue from which workers take calls; thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._first: deque[tuple[Job, Task]] = deque()
        self._waiting: dict[Access, deque[TicketCalls]] = {access: deque() for access in Access}
        self._turn: deque[Access] = deque(Access)
        self._running: set[Job] = set()
        self._n_leaving = 0
        self._look_at = float("inf")

    @property
    def idle(self) -> bool:
        """Whether nothing waits and nothing runs."""
        with self._changed:
            return not (self._first or self._running or any(self._waiting.values()))

    def running(self) -> list[Job]:
        """The jobs that workers run now, and the one that goes first."""
        with self._changed:
            return [*self._running, *(job for job, _ in self._first)]

    def put(self, calls: TicketCalls) -> None:
        """Queue a ticket's calls; never blocks."""
        with self._changed:
            self._waiting[calls.access].append(calls)
            self._look_at = min(self._look_at, calls.waits_until)
            self._changed.notify()

    def put_first(self, job: Job, task: Task) -> None:
        """Queue a task before everything else."""
        with self._changed:
            self._first.append((job, task))
            self._changed.notify()

    def take(self, bind: Callable[[Job, Call], Task]) -> tuple[Job, Task] | None:
        """The next job for a worker, waited for; None if the worker is to end."""
        with self._changed:
            while True:
                if self._first:
                    job, task = self._first.popleft()
                    self._running.add(job)
                    return job, task
                calls_and_job = self._next()
                if calls_and_job is not None:
                    calls, job = calls_and_job
                    self._running.add(job)
                    return job, bind(job, calls.call)
                if self._n_leaving:
                    self._n_leaving -= 1
                    return None
                self._changed.wait()

    def done(self, job: Job) -> None:
        """A job is over, or its worker was abandoned."""
        with self._changed:
            self._running.discard(job)
            self._first = deque(each for each in self._first if each[0] is not job)

    def let_leave(self, n_workers: int) -> None:
        """Let `n` workers end once no call waits."""
        with self._changed:
            self._n_leaving += n_workers
            self._changed.notify_all()

    def expired(self, now: float) -> list[TicketCalls]:
        """Take out tickets that waited too long without any call served."""
        if now < self._look_at:
            return []
        with self._changed:
            found = []
            served = {job.calls for job in self._running}
            self._look_at = float("inf")
            for access, waiting in self._waiting.items():
                late = {each for each in waiting if each.waits_until <= now} - served
                if late:
                    found += [each for each in waiting if each in late]
                    self._waiting[access] = deque(each for each in waiting if each not in late)
                for calls in self._waiting[access]:
                    self._look_at = min(self._look_at, calls.waits_until)
            return found

    def clear(self, access: Access) -> list[TicketCalls]:
        """Take out everything of one kind that waits."""
        if not self._waiting[access]:
            return []
        with self._changed:
            found = list(self._waiting[access])
            self._waiting[access].clear()
            return found

    def _next(self) -> tuple[TicketCalls, Job] | None:
        """The next call: reads and writes in turn, and the tickets of each in turn."""
        for _ in range(len(self._turn)):
            waiting = self._waiting[self._turn[0]]
            self._turn.rotate(-1)
            while waiting:
                calls = waiting.popleft()
                job = calls.take()
                if job is not None:
                    if not calls.over:
                        waiting.append(calls)
                        self._changed.notify()  # another worker takes its next call meanwhile
                    return calls, job
        return None
