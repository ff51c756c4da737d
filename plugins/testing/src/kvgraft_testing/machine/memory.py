"""Rows of pools to write and to read, even if the host cannot reach their memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvgraft_testing.simulated import DeviceTensor

__all__ = ["DeviceRows", "Rows", "plain", "rows_of", "spoil"]

Numbers = Sequence[int] | npt.NDArray[Any]
"""Of rows."""


class DeviceRows:
    """Rows `[n_rows, n_lanes]` of a device, with the used part of an array's interface.

    Writing is work of torch's current stream, which the host does not wait for. Reading waits for
    that stream.

    Args:
        rows: on the device.

    Attributes:
        dtype: an array's.
        shape: theirs.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows
        self.shape = tuple(rows.shape)
        self.dtype: np.dtype[Any] = torch.empty(0, dtype=rows.dtype).numpy().dtype

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, numbers: Numbers) -> npt.NDArray[Any]:
        index = _index(self._rows.device, np.array(numbers, dtype=np.int64).tobytes())
        found: npt.NDArray[Any] = self._rows.index_select(0, index).cpu().numpy()
        return found

    def __setitem__(self, numbers: Numbers, values: npt.NDArray[Any]) -> None:
        """One value for all of them, or an array of their shape."""
        if not len(numbers):
            return
        index = _index(self._rows.device, np.array(numbers, dtype=np.int64).tobytes())
        if values.ndim == 0:
            self._rows.index_fill_(0, index, values.item())
        else:
            new = torch.from_numpy(np.array(values, dtype=self.dtype))
            self._rows.index_copy_(0, index, _sent(new, self._rows.device))


@lru_cache(maxsize=64)
def _index(device: torch.device, numbers: bytes) -> torch.Tensor:
    """Numbers of rows on a device: one list is used for all planes of a pool."""
    return _sent(torch.frombuffer(bytearray(numbers), dtype=torch.int64), device)


def _sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy that arrives later, in the order of the stream."""
    return values.pin_memory().to(device, non_blocking=True)


Rows = npt.NDArray[Any] | DeviceRows


def plain(rows: torch.Tensor) -> torch.Tensor:
    """The bytes of rows, even if only a simulated device can see them."""
    return rows.on_device if isinstance(rows, DeviceTensor) else rows


def rows_of(rows: torch.Tensor) -> Rows:
    """Rows to read and write: as an array if the host reaches them."""
    rows = plain(rows)
    return rows.numpy() if rows.device.type == "cpu" else DeviceRows(rows)


def spoil(rows: torch.Tensor, numbers: torch.Tensor) -> None:
    """Overwrite rows with values that no request computes; skip numbers that are no rows."""
    rows = plain(rows)
    within = numbers[(numbers >= 0) & (numbers < len(rows))]
    value = 249 if rows.dtype is torch.uint8 else -7
    if rows.device.type == "cpu":
        rows[within] = value
    else:
        DeviceRows(rows)[within.numpy()] = np.array(value)
