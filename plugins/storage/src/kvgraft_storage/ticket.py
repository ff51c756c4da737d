"""Tickets of storage calls, and the pieces in which a call is carried out.

    QUEUED ─► COPYING ─► CALLING ─► RETURNED          a store: copy out of the caller's memory first
    QUEUED ─► CALLING ─► COPYING ─► RETURNED          a fetch: copy into the caller's memory last

A call's deadline begins when it enters CALLING. COPYING touches a caller's memory, for the time of
a copy or a checksum. In any other phase a deadline or a cancellation ends a job at once: later
results of its call are dropped. A synchronous backend fetches into the caller's memory while
CALLING: statuses are decided at the deadline, and the memory is lent until the call has returned.
"""

from __future__ import annotations

import enum
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvgraft.errors import ConfigError
from kvgraft_storage.breaker import Access
from kvgraft_storage.status import Status

if TYPE_CHECKING:
    from kvgraft_storage.fair_queue import TicketCalls

__all__ = ["Count", "Job", "Phase", "StorageTicket"]

STEP_S = 0.02
"""Seconds between two checks of the clock in `wait`."""


Count = Callable[[str, Sequence[Status]], None]
"""Called once with a verb and the statuses of its keys."""


def _nothing(statuses: Sequence[Status]) -> None:
    pass


class StorageTicket:
    """Progress of one call; ended by workers or its deadline, read by the scheduler.

    Attributes:
        statuses: per key, None while unknown.
        value: the result of a call without keys.
        error: why the backend failed, for people; a program needs only the statuses.
        tag: the caller's, given to `Completions.watch`; None until then.

    Any thread may read it, wait for it and cancel it.
    """

    __slots__ = (
        "_calls",
        "_changed",
        "_count",
        "_jobs",
        "_lent",
        "_open_jobs",
        "_poll",
        "_watched",
        "_watcher",
        "cancelled",
        "error",
        "statuses",
        "tag",
        "value",
    )

    def __init__(self, n_keys: int, poll: Callable[[], None], count: Count) -> None:
        self.statuses: list[Status | None] = [None] * n_keys
        self.value: object = None
        self.error: str | None = None
        self.tag: object = None
        self.cancelled = False
        self._open_jobs = 0
        self._lent = 0
        self._jobs: set[Job] = set()
        self._calls: TicketCalls | None = None
        self._watched = False
        self._watcher: Callable[[StorageTicket], None] | None = None
        self._poll = poll
        self._count = count
        self._changed = threading.Condition(threading.RLock())

    def __repr__(self) -> str:
        counts = Counter("pending" if each is None else each.value for each in self.statuses)
        told = ", ".join(f"{count} {status}" for status, count in counts.items())
        waits = "" if self.settled else ", under way"
        return f"<StorageTicket: {told or 'no keys'}{waits}>"

    @property
    def decided(self) -> bool:
        """Whether every key has its status; checks the deadlines, never blocks."""
        if self._open_jobs:
            if self.cancelled:
                self._give_up()
            self._poll()
        return not self._open_jobs

    @property
    def settled(self) -> bool:
        """Whether every key had its status when deadlines were last checked."""
        return not self._open_jobs

    @property
    def done(self) -> bool:
        """Whether it is decided and the caller's memory is the caller's again; never blocks.

        The two differ only while a call of a synchronous backend has outlasted its deadline.
        """
        return self.decided and not self._lent

    def _give_up(self) -> None:
        with self._changed:
            if self._calls is not None:
                self._calls.give_up(Status.TIMEOUT)
            for job in list(self._jobs):
                job.give_up()

    # -- for a queue of completions

    def watch(self, watcher: Callable[[StorageTicket], None], tag: object) -> None:
        """Call this watcher once when it is done; at once if it is already.

        Raises:
            ConfigError: it has or had a watcher.
        """
        with self._changed:
            if self._watched:
                raise ConfigError("storage ticket: is watched already; watch it in one queue")
            self._watched = True
            self._watcher = watcher
            self.tag = tag
            self._tell_if_done()

    def _tell_if_done(self) -> None:
        """After a change: tell the watcher if that was the last one."""
        if self._watcher is not None and not self._open_jobs and not self._lent:
            watcher, self._watcher = self._watcher, None
            watcher(self)

    # -- for the line

    def changing(self) -> threading.Condition:
        """The lock for every change of it."""
        return self._changed

    def queue(self, calls: TicketCalls) -> None:
        """Its calls wait in the queue."""
        self._calls = calls
        self._open_jobs += 1

    def leave(self) -> None:
        """None of its calls waits in the queue any more."""
        self._calls = None
        self._open_jobs -= 1
        self._changed.notify_all()
        self._tell_if_done()

    def refuse(self, verb: str, status: Status) -> None:
        """End all of its keys without a call."""
        statuses = [status] * len(self.statuses)
        self._count(verb, statuses)
        self.statuses[:] = statuses

    def settle_rest(self, verb: str, first: int, status: Status) -> None:
        """End the keys from `first` on, which still waited in the queue."""
        n_keys = len(self.statuses) - first
        statuses = [status] * n_keys
        self._count(verb, statuses)
        self.statuses[first:] = statuses
        self.leave()

    @property
    def n_leading_ok(self) -> int:
        """Keys from the first on that are OK without a gap so far (S5)."""
        for number, status in enumerate(self.statuses):
            if status is not Status.OK:
                return number
        return len(self.statuses)

    def cancel(self) -> None:
        """Give up: unfinished keys become TIMEOUT. The memory is free once `done` says so."""
        with self._changed:
            self.cancelled = True
            self._give_up()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done, at most `timeout_s` seconds; not for a scheduler's thread."""
        rounds = max(1, int(timeout_s / STEP_S))
        for _ in range(rounds):
            if self.done:
                return True
            with self._changed:
                self._changed.wait_for(lambda: not self._open_jobs + self._lent, STEP_S)
        return self.done


class Phase(enum.Enum):
    """The phase of a job; see the module."""

    QUEUED = enum.auto()
    COPYING = enum.auto()
    CALLING = enum.auto()
    RETURNED = enum.auto()


class Job:
    """Some keys of a ticket, carried out by one backend call.

    Args:
        ticket: whose.
        verb: the operation, for the counters.
        keys: half-open range of the ticket's keys.
        access: whether it reads or writes.
        calls: its ticket's calls, one of which it is.
        deadline: its latest end, by the storage's clock; by default set when it calls.

    Attributes:
        asks: the verb of the current call; a failure counts for it, and for `access`.
        settled: whether the ticket knows how it ended.
        lent: whether its call writes to the caller's memory.
    """

    __slots__ = (
        "access",
        "asks",
        "calls",
        "deadline",
        "first",
        "last",
        "lent",
        "phase",
        "settled",
        "ticket",
        "verb",
    )

    def __init__(
        self,
        ticket: StorageTicket,
        verb: str,
        keys: tuple[int, int],
        *,
        access: Access,
        calls: TicketCalls | None = None,
        deadline: float = float("inf"),
    ) -> None:
        self.ticket = ticket
        self.verb = self.asks = verb
        self.access = access
        self.calls = calls
        self.first, self.last = keys
        self.deadline = deadline
        self.lent = False
        self.phase = Phase.QUEUED
        self.settled = False
        with ticket._changed:
            ticket._open_jobs += 1
            ticket._jobs.add(self)

    @property
    def n_keys(self) -> int:
        """Keys it is about; 0 for calls without keys."""
        return self.last - self.first

    def call(self, now: float) -> bool:
        """Begin a call, and with it its deadline; false where the job is over."""
        with self.ticket._changed:
            if self.calls is not None:
                self.deadline = now + self.calls.deadline_s
            return self.enter(Phase.CALLING)

    def enter(self, phase: Phase) -> bool:
        """Enter a phase; false if the job is over."""
        with self.ticket._changed:
            if phase is Phase.RETURNED:
                self.phase = phase
                if self.lent:
                    self.lent = False
                    self.ticket._lent -= 1
                    self.ticket._changed.notify_all()
                    self.ticket._tell_if_done()
                return True
            if self.settled or self.ticket.cancelled:
                return False
            self.phase = phase
            return True

    def lend(self, now: float) -> bool:
        """Like `call`, for a call that writes to the caller's memory."""
        with self.ticket._changed:
            if not self.call(now):
                return False
            self.lent = True
            self.ticket._lent += 1
            return True

    def settle(
        self, statuses: Sequence[Status], note: Callable[[Sequence[Status]], None] = _nothing
    ) -> bool:
        """Settle its keys in the ticket; false if they were settled before.

        Args:
            statuses: of its keys.
            note: called with them before they are visible, if they are the first.
        """
        ticket = self.ticket
        with ticket._changed:
            if self.settled:
                return False
            self.settled = True
            ticket._jobs.discard(self)
            ticket._count(self.verb, statuses)
            note(statuses)
            ticket.statuses[self.first : self.last] = statuses
            ticket._open_jobs -= 1
            ticket._changed.notify_all()
            ticket._tell_if_done()
            return True

    def answer(self, value: object) -> None:
        """Give the ticket its value, unless that comes too late."""
        with self.ticket._changed:
            if not self.settled:
                self.ticket.value = value

    def give_up(self, note: Callable[[Sequence[Status]], None] = _nothing) -> bool:
        """End with TIMEOUT unless the caller's memory is in use now; whether it is over."""
        with self.ticket._changed:
            if self.phase is Phase.COPYING:
                return False
            self.settle([Status.TIMEOUT] * self.n_keys, note)
            return True
