"""Transfer engines whose copies end when the test says so."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.transfers import Fence, PlaneCopy, Ticket
from kvgraft_testing.stepped import SteppedTransferEngine

__all__ = ["PromptEngine"]


class _PromptTicket(Ticket):
    __slots__ = ("engine",)
    engine: PromptEngine

    def wait(self, timeout_s: float) -> bool:
        if not self.done:
            if self.engine.stuck:
                return False
            self.engine.hurry(self)
        return super().wait(timeout_s)


class PromptEngine(SteppedTransferEngine):
    """Copies run when they are told to, or when somebody waits for them.

    Attributes:
        failing: whether copies that are waited for fail.
        stuck: whether waiting for them is of no use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failing = self.stuck = False

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        del fence
        ticket = _PromptTicket(copies)
        ticket.engine = self
        self.pending.append(ticket)
        return ticket

    def hurry(self, ticket: Ticket) -> None:
        """Run one submission, or let it fail, now."""
        index = next(i for i, pending in enumerate(self.pending) if pending is ticket)
        if self.failing:
            self.fail(index)
        else:
            self.step(index)
