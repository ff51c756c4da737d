"""Copies that run when the caller says so: for tests, simulations and debugging.

The bytes really move. The caller chooses only when, and whether the transfer fails, so that every
interleaving of transfers with the rest of a cache can be tested and repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.errors import TransferError
from kvgraft.pools.component import PlaneCopy
from kvgraft.transfers.engine import Fence, Ticket, run_layers

__all__ = ["SteppedTransferEngine"]


class SteppedTransferEngine:
    """A transfer engine whose caller decides when each submission runs, and whether it fails.

    Attributes:
        pending: submissions that have not run, oldest first.
    """

    def __init__(self) -> None:
        self.pending: list[Ticket] = []

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Keep the copies until `step`; see `TransferEngine.submit`."""
        del fence
        ticket = Ticket(copies)
        self.pending.append(ticket)
        return ticket

    def step(self, index: int = 0) -> None:
        """Run one pending submission."""
        ticket = self.pending.pop(index)
        run_layers(ticket)
        ticket.finish()

    def fail(self, index: int = 0) -> None:
        """Let one pending submission fail without moving anything."""
        self.pending.pop(index).finish(TransferError("failed on request"))

    def run_all(self) -> None:
        """Run everything pending."""
        while self.pending:
            self.step()

    def close(self) -> None:
        """Run the submitted copies."""
        self.run_all()
