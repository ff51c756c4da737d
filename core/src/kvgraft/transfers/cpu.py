"""Copies on worker threads, for CPU pools."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

from kvgraft.errors import TransferError
from kvgraft.pools.copies import PlaneCopy, run_copy
from kvgraft.transfers.engine import Fence, Ticket

__all__ = ["CpuTransferEngine"]


class CpuTransferEngine:
    """Worker threads that run submissions in order.

    Args:
        n_workers: threads; submissions start in order, and with more than one may end out of it.
        fence_timeout_s: how long a copy waits for its fence before it fails.
    """

    def __init__(self, n_workers: int = 1, fence_timeout_s: float = 60.0) -> None:
        self._fence_timeout_s = fence_timeout_s
        self._queue: queue.SimpleQueue[tuple[Ticket, Fence | None] | None] = queue.SimpleQueue()
        self._workers = [
            threading.Thread(target=self._work, name=f"kvgraft-copy-{index}", daemon=True)
            for index in range(n_workers)
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Queue the copies; see `TransferEngine.submit`."""
        ticket = Ticket(copies)
        self._queue.put((ticket, fence))
        return ticket

    def close(self) -> None:
        """Finish the submitted copies and stop the workers."""
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            ticket, fence = item
            try:
                if fence is not None and fence.wait(self._fence_timeout_s) is False:
                    raise TransferError(f"the fence was not reached in {self._fence_timeout_s} s")
                run_layers(ticket)
            except Exception as error:  # noqa: BLE001 - the ticket carries the error
                ticket.finish(error)
            else:
                ticket.finish()


def run_layers(ticket: Ticket) -> None:
    """Run a ticket's copies, announcing each layer as it completes."""
    for position, copy in enumerate(ticket.copies):
        run_copy(copy)
        last = position + 1 == len(ticket.copies)
        if last or ticket.copies[position + 1].layer != copy.layer:
            ticket.finish_layer()
