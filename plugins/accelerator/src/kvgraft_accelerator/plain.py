"""Copies with torch alone, on every device: one call or a few for each plane or run of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraft.devices import PlaneCopy

if TYPE_CHECKING:
    from kvgraft_accelerator.runtime import AcceleratorStream

__all__ = ["copy_rows"]


def copy_rows(
    copies: Sequence[PlaneCopy],
    stream: AcceleratorStream,
    is_page_locked: Callable[[torch.Tensor], bool],
) -> None:
    """Submit copies to torch's current stream.

    Between the device and page-locked memory each run of rows is a call, so many small rows take
    the time of their calls. Pageable sources are read now, into torch's page-locked memory. The
    host waits for pageable targets, and for copies within its own memory.
    """
    on_device: dict[int, torch.Tensor] = {}

    def index(rows: torch.Tensor, device: torch.device) -> torch.Tensor:
        if id(rows) not in on_device:
            on_device[id(rows)] = rows.pin_memory().to(device, non_blocking=True)
        return on_device[id(rows)]

    for copy in copies:
        source, target = copy.source.view(copy.target.dtype), copy.target
        from_host, to_host = source.device.type == "cpu", target.device.type == "cpu"
        if from_host and to_host:
            stream.record().wait()
            target[copy.target_rows] = source[copy.source_rows]
        elif not from_host and not to_host:
            read, write = (index(rows, source.device) for rows in copy[3:5])
            target.index_copy_(0, write, source.index_select(0, read))
        elif is_page_locked(source if from_host else target):
            for first, into, n in _runs(copy):
                target[into : into + n].copy_(source[first : first + n], non_blocking=True)
        elif from_host:
            rows = source[copy.source_rows].pin_memory().to(target.device, non_blocking=True)
            target.index_copy_(0, index(copy.target_rows, target.device), rows)
        else:
            rows = source.index_select(0, index(copy.source_rows, source.device))
            target[copy.target_rows] = rows.cpu()


def _runs(copy: PlaneCopy) -> Iterable[tuple[int, int, int]]:
    """First rows and lengths of runs that are contiguous on both sides."""
    source_rows, target_rows = copy.source_rows.numpy(), copy.target_rows.numpy()
    if not len(source_rows):
        return []
    goes_on = (np.diff(source_rows) == 1) & (np.diff(target_rows) == 1)
    if (
        copy.source.stride(0) != copy.source.shape[1]
        or copy.target.stride(0) != copy.target.shape[1]
    ):
        goes_on[:] = False
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    lengths = np.diff(np.append(first, len(source_rows)))
    return zip(source_rows[first].tolist(), target_rows[first].tolist(), lengths.tolist())
