"""A transfer engine whose every outcome the test decides, waits included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraft.transfers import Fence, PlaneCopy, SteppedTransferEngine, Ticket

__all__ = ["PromptedTransferEngine", "Submission"]


class Submission(NamedTuple):
    """One submission and the pool rows it reads and writes, by `id` of the pool's lanes."""

    ticket: Ticket
    reads: tuple[tuple[int, frozenset[int]], ...]
    writes: tuple[tuple[int, frozenset[int]], ...]


class _PromptedTicket(Ticket):
    """Runs, or fails, as soon as somebody waits for it."""

    __slots__ = ("engine",)
    engine: PromptedTransferEngine

    def wait(self, timeout_s: float) -> bool:
        if not self.done:
            self.engine.prompted(self)
        return super().wait(timeout_s)


class PromptedTransferEngine(SteppedTransferEngine):
    """Copies run when they are told to, or when they are waited for.

    Attributes:
        failures: bits consumed by copies that are waited for; a set bit lets one fail.
        submissions: every submission that had not run when last looked at.
        submitted, failed: counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self.submissions: list[Submission] = []
        self.submitted = 0
        self.failed = 0

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        del fence
        ticket = _PromptedTicket(copies)
        ticket.engine = self
        self.pending.append(ticket)
        self.submitted += 1
        self.submissions.append(
            Submission(
                ticket,
                tuple((id(copy.source), frozenset(copy.source_rows.tolist())) for copy in copies),
                tuple((id(copy.target), frozenset(copy.target_rows.tolist())) for copy in copies),
            )
        )
        return ticket

    def fail(self, index: int = 0) -> None:
        self.failed += 1
        super().fail(index)

    def prompted(self, ticket: Ticket) -> None:
        """Run or fail one submission now."""
        index = next(i for i, pending in enumerate(self.pending) if pending is ticket)
        fails, self.failures = self.failures & 1, self.failures >> 1
        if fails:
            self.fail(index)
        else:
            self.step(index)

    def unfinished(self) -> list[Submission]:
        """Submissions that have not run."""
        self.submissions = [each for each in self.submissions if not each.ticket.done]
        return self.submissions
