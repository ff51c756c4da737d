"""Numbers that a kernel reads from page-locked memory of the host.

They are few for the bytes that they describe. A copy of them to the device would wait behind the
megabytes that another stream sends there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvgraft_accelerator.fragments import Numbers

__all__ = ["Table", "Tables"]

LEAST = 1 << 12
"""Numbers that the smallest table has room for."""


class Tables:
    """Tables of numbers in page-locked memory.

    One is used again when the kernel that read it has ended. Where none is free or large enough one
    more is made, so soon there are as many as copies are in flight, and nothing is allocated.

    Args:
        page_locked: takes memory that the device reaches, uint8 `[nbytes]`. Not torch's own: where
            a device is lost, torch ends the process when such memory is given back.
    """

    def __init__(self, page_locked: Callable[[int], torch.Tensor]) -> None:
        self._page_locked = page_locked
        self._tables: list[Table] = []

    def __len__(self) -> int:
        """Tables made so far."""
        return len(self._tables)

    def fill(self, columns: Sequence[Numbers]) -> Table:
        """A table with these columns, one behind the other.

        Whoever has submitted the kernel that reads it calls `read`.
        """
        n = sum(map(len, columns))
        free = (each for each in self._tables if len(each.numbers) >= n and each.is_free())
        table = next(free, None)
        if table is None:
            room = 1 << (max(n, LEAST) - 1).bit_length()
            table = Table(self._page_locked(8 * room).view(torch.int64))
            self._tables.append(table)
        np.concatenate(columns, out=table.numbers[:n])
        return table


class Table:
    """Room for numbers.

    Args:
        memory: page-locked, int64 `[room]`.

    Attributes:
        memory: see above.
        numbers: the same as an array.
        address: of the first.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.numbers, self.address = memory, memory.numpy(), memory.data_ptr()
        self._behind: torch.Event | None = None

    def is_free(self) -> bool:
        """Whether the kernel that reads it has ended."""
        return self._behind is None or self._behind.query()

    def read(self, stream: torch.Stream) -> None:
        """The kernel that reads it is the last work of `stream`."""
        self._behind = stream.record_event()
