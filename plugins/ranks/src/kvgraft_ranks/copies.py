"""Copies between DEVICE and HOST that end on all ranks at the same call (D2, D3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvgraft.errors import TransferError
from kvgraft.pools.component import PlaneCopy
from kvgraft.transfers import Fence, Ticket, Transfer, TransferEngine
from kvgraft.transfers.journal import Journal
from kvgraft.tree.operations import Operation
from kvgraft.types import Direction
from kvgraft_ranks.agreement import Agreement

__all__ = ["AgreedEngine", "AgreedTicket", "ranked_journal"]


class AgreedTicket(Ticket):
    """Progress of one submission on all ranks: it is done when all have agreed on it.

    Layers are this rank's own: `layer_ready` and `wait_layer` say when kernels here may read them.

    Attributes:
        real: this rank's ticket.
        agreed: whether it has ended on all ranks.
    """

    __slots__ = ("_agreement", "agreed", "real")

    def __init__(self, real: Ticket, agreement: Agreement) -> None:
        super().__init__(real.copies)
        self.real = real
        self.agreed = False
        self._agreement = agreement

    @property
    def done(self) -> bool:
        """Whether the copies ended on all ranks; after an error of the ranks, on this one."""
        if not self.agreed and self._agreement.broken is not None and self.real.done:
            self.agreed, self.error = True, self.real.error
        return self.agreed

    def agree(self, failed: Sequence[int]) -> None:
        """It ended on all ranks, and failed on some."""
        self.agreed = True
        if failed:
            self.error = self.real.error or TransferError(
                f"the copy failed on rank {failed[0]}, so it fails on all"
            )
        self.layers_done = self.real.layers_done

    def layer_ready(self, layer: int) -> bool:
        """Whether this rank's data of a layer can be read (R7)."""
        return self.real.layer_ready(layer)

    def layer_event(self, layer: int) -> Any:
        """The event that a kernel of this rank waits for; see `StreamTicket.layer_event`."""
        real: Any = self.real
        return real.layer_event(layer)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end on all ranks, at most `timeout_s` seconds of rank 0."""
        if self.done:
            return True
        if self._agreement.broken is not None:
            return self.real.wait(timeout_s) and self.done
        return self._agreement.wait(lambda: self.done, timeout_s, self.real.wait)

    def wait_layer(self, layer: int, timeout_s: float) -> None:
        """Wait until this rank's data of a layer can be read; see `Ticket.wait_layer`."""
        self.real.wait_layer(layer, timeout_s)


class AgreedEngine:
    """An engine whose copies end on all ranks at once.

    Args:
        engine: this rank's own.
        agreement: with the other ranks.
    """

    def __init__(self, engine: TransferEngine, agreement: Agreement) -> None:
        self.engine = engine
        self._agreement = agreement

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Start copying after `fence`; never blocks."""
        ticket = AgreedTicket(self.engine.submit(copies, fence), self._agreement)
        self._agreement.add_copy(ticket)
        return ticket

    def close(self) -> None:
        """Finish the submitted copies and stop."""
        self.engine.close()


def ranked_journal(plain: type[Journal], agreement: Agreement) -> type[Journal]:
    """A journal that says by the agreed clock which transfers are overdue (D1)."""

    class RankedJournal(plain):  # type: ignore[misc, valid-type]
        __doc__ = plain.__doc__

        def submit(
            self, operation: Operation, direction: Direction, fence: Fence | None = None
        ) -> Transfer:
            transfer: Transfer = super().submit(operation, direction, fence)
            transfer.submitted_s = agreement.clock()
            return transfer

        def n_overdue(self, timeout_s: float) -> int:
            due_s = agreement.clock() - timeout_s
            return sum(
                not each.ticket.done and (each.late or each.submitted_s <= due_s)
                for queue in self.queues.values()
                for each in queue
            )

    return RankedJournal
