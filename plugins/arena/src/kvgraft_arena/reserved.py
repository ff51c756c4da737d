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
from kvgraft.optional import load_part
from kvgraft.sizes import format_nbytes

__all__ = ["AddressSpace", "ReservedSpace", "can_reserve", "reserve"]

LINUX_NO_RESERVE = 0x4000
"""`MAP_NORESERVE`, which Python does not name everywhere."""


class ReservedSpace(Protocol):
    """Address space on one device; the first bytes of each part are backed by memory.

    Attributes:
        slack_nbytes: most bytes that it takes beyond the requested ones.
    """

    slack_nbytes: int

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 `[n_parts, nbytes]`; only backed bytes may be touched."""

    def resize(self, nbytes: int) -> None:
        """Back the first `nbytes` bytes of every part with memory, rounded up.

        Raises:
            MemoryError: the device does not have that much; the memory stays as it was.
        """


def can_reserve(device: torch.device) -> bool:
    """Whether address space can be reserved on a device."""
    return device.type == "cpu" or (device.type == "cuda" and bool(load_part("mapped").is_there()))


def reserve(nbytes: int, device: torch.device, n_parts: int = 1) -> ReservedSpace:
    """Zeroed memory at a fixed address on the CPU or on a CUDA device; none is taken yet.

    Parts of `nbytes` bytes each, one behind the other, as one tensor.

    Raises:
        ConfigError: the system has not that much address space.
    """
    if device.type == "cpu":
        return AddressSpace(nbytes, n_parts)
    space: ReservedSpace = load_part("mapped").on(device, nbytes, n_parts)
    return space


class AddressSpace:
    """Address space of the host.

    A page takes memory once it is written to. A page that was given back reads as zeros and takes
    none.

    Args:
        nbytes: how much address space each part has; rounded up to whole pages.
        n_parts: how many there are.

    Raises:
        ConfigError: the system has not that much.
    """

    def __init__(self, nbytes: int, n_parts: int = 1) -> None:
        self._stride = _pages(max(1, nbytes))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        if sys.platform == "linux":
            flags |= LINUX_NO_RESERVE
        try:
            self._map = mmap.mmap(-1, n_parts * self._stride, flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"pool: {format_nbytes(n_parts * nbytes)} of address space, {error}; lower the "
                "budget"
            ) from error
        self.nbytes, self.n_parts = nbytes, n_parts
        self.slack_nbytes = 0  # a page takes memory at its first write

    def tensor(self) -> torch.Tensor:
        """All of it, uint8 `[n_parts, nbytes]`; the memory lives as long as the tensor."""
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        return memory.view(self.n_parts, self._stride)[:, : self.nbytes]

    def resize(self, nbytes: int) -> None:
        """Give back each part's pages behind the first `nbytes` bytes."""
        first = _pages(nbytes)
        if first < self._stride and hasattr(mmap, "MADV_DONTNEED"):
            for start in range(0, self.n_parts * self._stride, self._stride):
                self._map.madvise(mmap.MADV_DONTNEED, start + first, self._stride - first)


def _pages(nbytes: int) -> int:
    """Rounded up to whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
