"""A transfer engine as hostile as the interface allows: every outcome is the caller's choice.

A copy stays pending until the caller runs it, fails it or waits for it; a wait may time out first.
Until then its destination holds garbage, and when it runs it reads its source as it is then. Rows
are noted, so that a copy that starts before its source is computed is found (B4).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvgraft.transfers import Fence, PlaneCopy, Ticket
from kvgraft_accelerator.protocol import StreamRuntime
from kvgraft_testing.machine.memory import spoil
from kvgraft_testing.simulated import Unordered
from kvgraft_testing.stepped import SteppedTransferEngine

__all__ = ["Point", "PromptedTransferEngine", "Submission", "Wait"]


class Wait(enum.Enum):
    """The outcome of a copy that a caller waits for."""

    RUNS = "runs"
    FAILS = "fails"
    TIMES_OUT = "is still pending at the time-out"


@dataclass(frozen=True, eq=False)
class Point:
    """A fence: the computation up to step `number` (B4).

    Attributes:
        number: the step.
        reached: says up to which step the model has computed.
    """

    number: int
    reached: Callable[[], int]

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the computation has come that far; a wait without end lets it come."""
        return timeout is None or self.number <= self.reached()


class Submission(NamedTuple):
    """One submission.

    Attributes:
        ticket: its progress.
        fence: the fence it waits for.
        reads, writes: pool rows by `id` of the pool's lanes.
    """

    ticket: Ticket
    fence: Fence | None
    reads: tuple[tuple[int, frozenset[int]], ...]
    writes: tuple[tuple[int, frozenset[int]], ...]


class _PromptedTicket(Ticket):
    """Runs, fails or runs out of time as soon as somebody waits for it."""

    __slots__ = ("engine",)
    engine: PromptedTransferEngine

    def wait(self, timeout_s: float) -> bool:
        del timeout_s
        if not self.done:
            self.engine.prompted(self)
        return self.done


class PromptedTransferEngine(SteppedTransferEngine):
    """Copies run when the caller says so, or waits for them.

    Attributes:
        runtime: the device of the cache; None on the CPU.
        outcomes: results of the next copies that are waited for; then they run.
        submissions: every submission that had not run at the last check.
        submitted: called with every submission.
        broken: copies that could not run at all, with their errors.
        time_outs: waits that timed out.
        failed: copies that failed, on request or because they could not run.
    """

    runtime: StreamRuntime | None = None

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: list[Wait] = []
        self.submissions: list[Submission] = []
        self.submitted: Callable[[Submission], None] = lambda submission: None
        self.broken: list[tuple[Ticket, Exception]] = []
        self.time_outs = 0
        self.failed = 0

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Keep the copies until they are stepped, failed or waited for."""
        for copy in copies:
            spoil(copy.target, copy.target_rows)
        ticket = self.accept(copies, fence)
        self.pending.append(ticket)
        submission = Submission(
            ticket,
            fence,
            tuple((id(copy.source), frozenset(copy.source_rows.tolist())) for copy in copies),
            tuple((id(copy.target), frozenset(copy.target_rows.tolist())) for copy in copies),
        )
        self.submissions.append(submission)
        self.submitted(submission)
        return ticket

    def accept(self, copies: Sequence[PlaneCopy], fence: Fence | None) -> Ticket:
        """The ticket of a submission."""
        del fence
        ticket = _PromptedTicket(copies)
        ticket.engine = self
        return ticket

    def settle(self) -> Sequence[Unordered]:
        """A call is over: the model's steps have run; pairs of accesses that nothing orders."""
        return ()

    def step(self, index: int = 0) -> None:
        """Run one pending submission; like every engine, it fails if its copies cannot run."""
        ticket = self.pending[index]
        try:
            super().step(index)
        except Exception as error:  # noqa: BLE001 - the ticket carries the error
            self.broken.append((ticket, error))
            self.failed += 1
            ticket.finish(error)

    def fail(self, index: int = 0) -> None:
        """Let one pending submission fail without moving anything."""
        self.failed += 1
        super().fail(index)

    def prompted(self, ticket: Ticket) -> None:
        """A caller waits for a submission."""
        index = next(i for i, pending in enumerate(self.pending) if pending is ticket)
        outcome = self.outcomes.pop(0) if self.outcomes else Wait.RUNS
        if outcome is Wait.TIMES_OUT:
            self.time_outs += 1
        elif outcome is Wait.FAILS:
            self.fail(index)
        else:
            self.step(index)

    def unfinished(self) -> list[Submission]:
        """Submissions that have not run."""
        self.submissions = [each for each in self.submissions if not each.ticket.done]
        return self.submissions
