"""Page-aligned memory, and copies that let other threads run."""

from __future__ import annotations

import abc
import ctypes
import mmap
from collections.abc import Iterable, Sequence

import numpy as np

__all__ = [
    "BLOCK_NBYTES",
    "Buffers",
    "Memory",
    "address_of",
    "aligned",
    "as_bytes",
    "copy",
    "gather",
    "is_aligned",
    "nbytes_of",
    "parts_of",
    "round_up",
    "scatter",
]

BLOCK_NBYTES = 4096
"""Alignment of direct I/O in bytes: in memory, in length and on disk."""


Memory = memoryview | tuple[memoryview, ...]
"""The memory of one payload: bytes in one place, or in parts in their order."""


class Buffers(abc.ABC):
    """Memory of many payloads, looked up part by part."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Payloads."""

    @abc.abstractmethod
    def __getitem__(self, part: slice) -> Sequence[Memory]:
        """The memory of some of them, contiguous bytes each or parts of those; on any thread."""

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
    view = memoryview(buffer)  # type: ignore[arg-type]
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    return view.cast("B")


def parts_of(memory: Memory) -> tuple[memoryview, ...]:
    """All of its parts, in order."""
    return memory if isinstance(memory, tuple) else (memory,)


def nbytes_of(memory: Memory) -> int:
    """Bytes of all its parts."""
    return len(memory) if isinstance(memory, memoryview) else sum(map(len, memory))


def address_of(view: memoryview) -> int:
    """Where memory starts; at least one byte."""
    if view.readonly:
        return int(np.frombuffer(view, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # a seventh of the time


def is_aligned(view: memoryview) -> bool:
    """Whether direct I/O can use it without a copy."""
    if len(view) % BLOCK_NBYTES:
        return False
    return address_of(view) % BLOCK_NBYTES == 0


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes of equal number; numpy releases the interpreter lock while it does."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def gather(target: memoryview, parts: Iterable[memoryview]) -> None:
    """Copy parts one behind the other; `target` is as long as all of them."""
    start = 0
    for part in parts:
        copy(target[start : start + len(part)], part)
        start += len(part)


def scatter(parts: Iterable[memoryview], source: memoryview) -> None:
    """Undo `gather`."""
    start = 0
    for part in parts:
        copy(part, source[start : start + len(part)])
        start += len(part)
