"""Copies on side streams, for CUDA pools.

Device rows are gathered and scattered on the device, moved through page-locked staging memory and
spread over the host slabs by a worker thread, so the scheduler and the model's stream never wait.
Backups wait for the stream that computed the data; loads announce every layer with an event the
model's stream can wait on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from kvgraft.errors import TransferError
from kvgraft.pools.copies import PlaneCopy
from kvgraft.transfers.engine import Fence, Ticket

__all__ = ["CudaTransferEngine"]


class CudaTransferEngine:
    """One worker and one side stream per direction.

    Args:
        device: the CUDA device of the pools.

    Attributes:
        layer_events: per ticket, a CUDA event per layer, for `stream.wait_event`.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise TransferError("no CUDA device; open the cache with device='cpu'")
        self.device = torch.device(device)
        self.layer_events: dict[int, dict[int, torch.cuda.Event]] = {}
        self._lanes = [_Lane(self), _Lane(self)]

    def submit(self, copies: Sequence[PlaneCopy], fence: Fence | None = None) -> Ticket:
        """Queue the copies behind the current stream's work; see `TransferEngine.submit`."""
        ticket = Ticket(copies)
        produced = torch.cuda.Event()  # type: ignore[no-untyped-call]
        produced.record(torch.cuda.current_stream(self.device))
        to_host = bool(copies) and copies[0].source.is_cuda
        self._lanes[to_host].queue.put((ticket, fence, produced))
        return ticket

    def close(self) -> None:
        """Finish the submitted copies and stop the workers."""
        for lane in self._lanes:
            lane.queue.put(None)
        for lane in self._lanes:
            lane.thread.join()


class _Lane:
    """A worker thread, its stream and its queue."""

    def __init__(self, engine: CudaTransferEngine) -> None:
        self.engine = engine
        self.stream = torch.cuda.Stream(engine.device)  # type: ignore[no-untyped-call]
        self.queue: queue.SimpleQueue[tuple[Ticket, Fence | None, torch.cuda.Event] | None]
        self.queue = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="kvgraft-cuda-copy", daemon=True)
        self.thread.start()

    def _work(self) -> None:
        while (item := self.queue.get()) is not None:
            ticket, fence, produced = item
            try:
                if fence is not None:
                    fence.wait()
                self.stream.wait_event(produced)
                for layer, copies in _by_layer(ticket):
                    self._run_layer(layer, copies, ticket)
            except Exception as error:  # noqa: BLE001 - the ticket carries the error
                ticket.finish(error)
            else:
                ticket.finish()

    def _run_layer(self, layer: int, copies: list[PlaneCopy], ticket: Ticket) -> None:
        arrivals: list[tuple[PlaneCopy, torch.Tensor]] = []
        with torch.cuda.stream(self.stream):
            for copy in copies:
                if copy.source.is_cuda:
                    rows = copy.source_rows.to(self.engine.device, non_blocking=True)
                    gathered = copy.source.index_select(0, rows)
                    staging = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
                    staging.copy_(gathered, non_blocking=True)
                    arrivals.append((copy, staging))
                else:
                    staging = copy.source[copy.source_rows].pin_memory()
                    moved = staging.to(self.engine.device, non_blocking=True)
                    rows = copy.target_rows.to(self.engine.device, non_blocking=True)
                    copy.target.index_copy_(0, rows, moved)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self.stream)
        self.engine.layer_events.setdefault(id(ticket), {})[layer] = event
        event.synchronize()
        for copy, staging in arrivals:
            copy.target[copy.target_rows] = staging
        ticket.finish_layer()
        if ticket.layers_done == len(ticket.layers):
            self.engine.layer_events.pop(id(ticket), None)


def _by_layer(ticket: Ticket) -> Iterator[tuple[int, list[PlaneCopy]]]:
    for layer, copies in groupby(ticket.copies, key=lambda copy: copy.layer):
        yield layer, list(copies)
