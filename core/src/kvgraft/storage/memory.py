"""Page-aligned memory, and copies that let other threads run."""

from __future__ import annotations

import abc
import mmap
from collections.abc import Iterable

import numpy as np

__all__ = ["BLOCK_NBYTES", "Buffers", "aligned", "as_bytes", "copy", "is_aligned", "round_up"]

BLOCK_NBYTES = 4096
"""Alignment of direct I/O in bytes: in memory, in length and on disk."""


class Buffers(abc.ABC):
    """Memory of many payloads, looked up part by part."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Payloads."""

    @abc.abstractmethod
    def __getitem__(self, part: slice) -> list[memoryview]:
        """The memory of some of them, contiguous bytes each; on any thread."""

    @abc.abstractmethod
    def sizes(self) -> Iterable[int]:
        """Bytes of each."""


def round_up(nbytes: int) -> int:
    """The next multiple of a block."""
    return -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES


def aligned(nbytes: int) -> memoryview:
    """Zeroed memory that starts at a block; freed when nothing refers to it any more."""
    return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def as_bytes(buffer: object) -> memoryview:
    """Anything with the buffer protocol as a flat view of bytes.

    Raises:
        TypeError: no buffer, or not contiguous.
    """
    return memoryview(buffer).cast("B")  # type: ignore[arg-type]


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O can use it as it is."""
    if len(view) % BLOCK_NBYTES:
        return False
    return int(np.frombuffer(view, np.uint8).ctypes.data) % BLOCK_NBYTES == 0


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal number; numpy releases the interpreter lock while it does."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
