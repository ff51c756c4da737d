"""Memory that stays where it is while pools take and give back parts of it.

A pool whose boundary moves reserves address space for the most slots that it can have, so its
tensors and the kernels that hold them stay.
"""

from __future__ import annotations

import mmap
import sys
from typing import Protocol

import torch

from kvgraft.errors import ConfigError
from kvgraft.pools.cuda_driver import CudaDriver
from kvgraft.pools.mapped import MappedSpace
from kvgraft.sizes import format_nbytes

__all__ = ["AddressSpace", "ReservedSpace", "can_reserve", "reserve"]

LINUX_NO_RESERVE = 0x4000
"""`MAP_NORESERVE`, which Python does not name everywhere."""


class ReservedSpace(Protocol):
    """Address space on one device, of which the first bytes have memory.

    Attributes:
        slack_nbytes: most bytes that it takes beyond those that it was asked for.
    """

    slack_nbytes: int

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 `[nbytes]`; only what has memory may be touched."""

    def resize(self, nbytes: int) -> None:
        """Have memory for the first `nbytes` bytes, and for few behind them.

        Raises:
            MemoryError: the device has not that much; what was there stays.
        """


def can_reserve(device: torch.device) -> bool:
    """Whether address space can be reserved on a device."""
    return device.type == "cpu" or (device.type == "cuda" and CudaDriver.find() is not None)


def reserve(nbytes: int, device: torch.device) -> ReservedSpace:
    """Zeroed memory of a fixed address on the CPU or on a CUDA device; none is taken yet.

    Raises:
        ConfigError: the system has not that much address space.
    """
    if device.type == "cpu":
        return AddressSpace(nbytes)
    driver = CudaDriver.find()
    assert driver is not None, "see can_reserve"
    return MappedSpace(driver, nbytes, device)


class AddressSpace:
    """Address space of the host.

    A page of it takes memory once it is written to. Given back it reads as zeros and takes none.

    Args:
        nbytes: how much address space.

    Raises:
        ConfigError: the system has not that much.
    """

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if sys.platform == "linux":
            flags |= LINUX_NO_RESERVE
        try:
            self._map = mmap.mmap(-1, max(1, nbytes), flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"pool: {format_nbytes(nbytes)} of address space, {error}; lower the budget"
            ) from error
        self.nbytes = nbytes
        self.slack_nbytes = 0  # a page is taken by what is written to it

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 `[nbytes]`; the memory lives as long as the tensor."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=self.nbytes)

    def resize(self, nbytes: int) -> None:
        """The bytes from `nbytes` on are of no use; a page that begins before them stays."""
        first = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < self.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, self.nbytes - first)
