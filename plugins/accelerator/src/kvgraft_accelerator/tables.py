"""Numbers that a kernel reads from page-locked host memory.

They are small beside the data that they describe. A copy of them to the device would wait behind
megabytes of another stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvgraft_accelerator.fragments import Numbers

__all__ = ["Table", "Tables"]

LEAST = 1 << 12
"""Size of the smallest table, in numbers."""


class Tables:
    """Tables of numbers in page-locked memory.

    A table is used again when the kernel that read it has ended. If none is free and large enough,
    another is made. So there are soon as many as copies in flight, and nothing more is allocated.

    Args:
        page_locked: allocates memory that the device can read, uint8 `[nbytes]`. Torch's own is not
            used: after a device is lost, torch ends the process when such memory is freed.
    """

    def __init__(self, page_locked: Callable[[int], torch.Tensor]) -> None:
        self._page_locked = page_locked
        self._tables: list[Table] = []

    def __len__(self) -> int:
        """Tables made so far."""
        return len(self._tables)

    def fill(self, columns: Sequence[Numbers]) -> Table:
        """A table with these columns, one behind the other.

        After submitting the kernel that reads it, call `read`.
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
        address: address of the first number.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory, self.numbers, self.address = memory, memory.numpy(), memory.data_ptr()
        self._behind: torch.Event | None = None

    def is_free(self) -> bool:
        """Whether the kernel that reads it has ended."""
        return self._behind is None or self._behind.query()

    def read(self, stream: torch.Stream) -> None:
        """Note that the last work of `stream` is the kernel that reads it."""
        self._behind = stream.record_event()
