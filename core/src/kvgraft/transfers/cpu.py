"""Copies on worker threads, for CPU pools."""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TypeAlias

from kvgraft.errors import TransferError
from kvgraft.pools.copies import PlaneCopy, run_copy
from kvgraft.transfers.engine import Fence, Ticket

__all__ = ["CpuTransferEngine"]

Submissions: TypeAlias = "queue.SimpleQueue[tuple[Ticket, Fence | None, float] | None]"
"""Each ticket with its fence, and the time by `time.monotonic` at which it waits no longer."""


class CpuTransferEngine:
    """Worker threads that run submissions in order.

    Args:
        n_workers: threads; submissions start in order, and with more than one may end out of it.
        fence_timeout_s: seconds after its submission at which a copy whose fence was not reached
            fails; a cache gives the engine it makes its `transfer_timeout_s`.
    """

    def __init__(self, n_workers: int = 1, fence_timeout_s: float = 30.0) -> None:
        self._queue: Submissions = queue.SimpleQueue()
        self._fence_timeout_s = fence_timeout_s
        self._workers = [
            threading.Thread(
                target=_work,
                args=(self._queue, fence_timeout_s),
                name=f"kvgraft-copy-{index}",
                daemon=True,
            )
            for index in range(n_workers)
        ]
        for worker in self._workers:
            worker.start()
        # Workers know the queue alone: an engine that is dropped unclosed stops them as well.
        self._stop = weakref.finalize(self, _stop, self._queue, n_workers)

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Queue the copies; see `TransferEngine.submit`. Once it is closed they fail at once."""
        ticket = Ticket(copies)
        if self._stop.alive:
            self._queue.put((ticket, fence, time.monotonic() + self._fence_timeout_s))
        else:
            ticket.finish(TransferError("the engine is closed: nothing is copied any more"))
        return ticket

    def close(self) -> None:
        """Finish the submitted copies and stop the workers."""
        self._stop()
        for worker in self._workers:
            worker.join()


def _stop(submissions: Submissions, n_workers: int) -> None:
    for _ in range(n_workers):
        submissions.put(None)


def _work(submissions: Submissions, fence_timeout_s: float) -> None:
    """Run submissions until told to stop; between two it holds none, and so no pool."""
    while (item := submissions.get()) is not None:
        ticket, fence, until = item
        try:
            if fence is not None and fence.wait(max(0.0, until - time.monotonic())) is False:
                raise TransferError(f"the fence was not reached in {fence_timeout_s} s")
            run_layers(ticket)
        except Exception as error:  # noqa: BLE001 - the ticket carries the error
            ticket.finish(error)
        else:
            ticket.finish()
        del item, ticket, fence


def run_layers(ticket: Ticket) -> None:
    """Run a ticket's copies, announcing each layer as it completes."""
    for position, copy in enumerate(ticket.copies):
        run_copy(copy)
        last = position + 1 == len(ticket.copies)
        if last or ticket.copies[position + 1].layer != copy.layer:
            ticket.finish_layer()
