"""Memory that stays where it is while pools give parts of it back.

A pool whose boundary moves reserves address space for the most slots that it can have, so its
tensors and the kernels that hold them stay.
"""

from __future__ import annotations

import mmap
import sys

import torch

from kvgraft.errors import ConfigError
from kvgraft.sizes import format_nbytes

__all__ = ["AddressSpace"]

LINUX_NO_RESERVE = 0x4000
"""`MAP_NORESERVE`, which Python does not name everywhere."""


class AddressSpace:
    """Zeroed memory of a fixed address, of which the end can be given back.

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

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 `[nbytes]`; the memory lives as long as the tensor."""
        return torch.frombuffer(self._map, dtype=torch.uint8, count=self.nbytes)

    def give_back(self, start: int) -> None:
        """The bytes from `start` on are of no use; a page that begins before them stays."""
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if first < self.nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, self.nbytes - first)
