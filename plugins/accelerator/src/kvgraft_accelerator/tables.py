"""Addresses on the device, as a kernel takes them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvgraft_accelerator.fragments import Fragments

__all__ = ["Tables"]

LEAST = 1 << 12
"""Fragments that the smallest table has room for."""


class Tables:
    """Tables of addresses, each with page-locked memory that it is filled from.

    One is used again when the kernel that read it has ended. Where none is free or large enough one
    more is made, so soon there are as many as copies are in flight, and nothing is allocated.

    Args:
        device: where the tables are.
        page_locked: takes memory that copies reach in the background, uint8 `[nbytes]`. Not torch's
            own: where a device is lost, torch ends the process when such memory is given back.
    """

    def __init__(self, device: torch.device, page_locked: Callable[[int], torch.Tensor]) -> None:
        self._device, self._page_locked = device, page_locked
        self._tables: list[_Table] = []

    def __len__(self) -> int:
        """Tables made so far."""
        return len(self._tables)

    def fill(self, fragments: Fragments) -> _Table:
        """A table with these fragments, in the order of the current stream.

        Whoever has submitted the kernel that reads it calls `read`.
        """
        n = len(fragments.nbytes)
        free = (each for each in self._tables if len(each.on_host) >= 3 * n and each.is_free())
        table = next(free, None)
        if table is None:
            room = 1 << (max(n, LEAST) - 1).bit_length()
            on_host = self._page_locked(3 * 8 * room).view(torch.int64)
            table = _Table(on_host, self._device)
            self._tables.append(table)
        np.concatenate(fragments, out=table.numbers[: 3 * n])
        table.on_device[: 3 * n].copy_(table.on_host[: 3 * n], non_blocking=True)
        return table


class _Table:
    """Room for sources, targets and sizes of fragments, one behind the other.

    Attributes:
        on_host: page-locked, int64 `[3 * room]`.
        on_device: the copy that kernels read.
        numbers: `on_host` as an array.
    """

    def __init__(self, on_host: torch.Tensor, device: torch.device) -> None:
        self.on_host = on_host
        self.on_device = torch.empty(len(on_host), dtype=torch.int64, device=device)
        self.numbers = self.on_host.numpy()
        self._behind: torch.Event | None = None

    def is_free(self) -> bool:
        """Whether the kernel that reads it has ended."""
        return self._behind is None or self._behind.query()

    def read(self, stream: torch.Stream) -> None:
        """The kernel that reads it is the last work of `stream`."""
        self._behind = stream.record_event()
