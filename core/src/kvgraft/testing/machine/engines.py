"""A transfer engine whose every outcome the caller decides, waits included."""

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
        broken: copies that could not run at all, with what they raised.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failures = 0
        self.submissions: list[Submission] = []
        self.broken: list[tuple[Ticket, Exception]] = []

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Keep the copies until they are stepped, failed or waited for."""
        del fence
        ticket = _PromptedTicket(copies)
        ticket.engine = self
        self.pending.append(ticket)
        self.submissions.append(
            Submission(
                ticket,
                tuple((id(copy.source), frozenset(copy.source_rows.tolist())) for copy in copies),
                tuple((id(copy.target), frozenset(copy.target_rows.tolist())) for copy in copies),
            )
        )
        return ticket

    def step(self, index: int = 0) -> None:
        """Run one pending submission; like every engine, it fails if its copies cannot run."""
        ticket = self.pending[index]
        try:
            super().step(index)
        except Exception as error:  # noqa: BLE001 - whatever went wrong, the ticket says so
            self.broken.append((ticket, error))
            ticket.finish(error)

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
