"""Copies between pools without payload: there is nothing to move."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.pools.copies import PlaneCopy
from kvgraft.transfers.engine import Fence, Ticket

__all__ = ["NoPayloadTransferEngine"]


class NoPayloadTransferEngine:
    """A transfer engine for pools on torch's device `meta`: every submission ends at once.

    Fences order reads and writes of payload, so there is none to wait for.
    """

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """A ticket that has ended; see `TransferEngine.submit`."""
        del fence
        ticket = Ticket(copies)
        ticket.layers_done = len(ticket.layers)
        ticket.finish()
        return ticket

    def close(self) -> None:
        """Nothing was left to finish."""
