"""A kernel that copies pieces of memory by their addresses.

One kernel gathers rows of many planes into a ring, and scatters rows of a ring into planes: both
are pieces with addresses. It has a program for each multiprocessor: it is over soon, and the model
waits for one wave of it at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvgraft_accelerator.fragments import Fragments
from kvgraft_accelerator.tables import Tables

__all__ = ["KernelCopies", "alignment", "constants", "copy_fragments", "n_multiprocessors"]

PROGRAMS = 32
"""Programs that copy at once on a device that does not say how many multiprocessors it has."""

TILES_NBYTES = (4 << 10, 16 << 10)
"""Bytes that a program has in flight: the smallest tile that holds every piece, or the largest."""

WARPS = 8

WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}
"""By the bytes to which addresses and sizes are aligned, the word that is moved."""


@triton.jit(do_not_specialize=["n_fragments"])  # type: ignore[untyped-decorator]
def copy_fragments(  # type: ignore[no-untyped-def]
    table,
    n_fragments,
    WORD: tl.constexpr,  # noqa: N803
    N_WORDS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Copy fragments; program p copies p, p + programs, and so on.

    Args:
        table: int64 `[3 * n_fragments]`: sources, targets, sizes in bytes.
        n_fragments: how many.
        WORD: type of the words that are moved.
        N_WORDS: words that a thread moves at once, side by side.
        TILE: such groups of words that a program moves at once.
    """
    nbytes_of_group: tl.constexpr = N_WORDS * WORD.primitive_bitwidth // 8
    groups = tl.arange(0, TILE)[:, None]
    words = tl.arange(0, N_WORDS)[None, :]
    for at in range(tl.program_id(0), n_fragments, tl.num_programs(0)):
        source = tl.load(table + at).to(tl.pointer_type(WORD))
        target = tl.load(table + n_fragments + at).to(tl.pointer_type(WORD))
        read = tl.multiple_of(source, nbytes_of_group)
        write = tl.multiple_of(target, nbytes_of_group)
        n_groups = tl.load(table + 2 * n_fragments + at) // nbytes_of_group
        for first in range(0, n_groups, TILE):
            here = (first + groups) * N_WORDS + words
            there = first + groups < n_groups
            moved = tl.load(read + here, mask=there, cache_modifier=".cg")
            tl.store(write + here, moved, mask=there)


class KernelCopies:
    """Copies by the kernel; see `Way`.

    It is compiled for pieces of whole 16 bytes when this is made; for others at their first copy.

    Args:
        device: where it runs.
        page_locked: see `Tables`.

    Attributes:
        programs: that copy at once.
    """

    def __init__(self, device: torch.device, page_locked: Callable[[int], torch.Tensor]) -> None:
        self.programs = n_multiprocessors(device) or PROGRAMS
        self._tables = Tables(device, page_locked)
        nothing = Fragments(*np.zeros((3, 0), np.int64))
        for tile_nbytes in TILES_NBYTES:
            words = constants(16, tile_nbytes)
            table = self._tables.fill(nothing)
            copy_fragments[(1,)](table.on_device, 0, num_warps=WARPS, **words)

    def __call__(
        self,
        fragments: Fragments,
        stream: torch.Stream,
        behind: Sequence[torch.Event] = (),
        sent_by: torch.Stream | None = None,
    ) -> None:
        """Submit them; their addresses are on the device before the stream waits."""
        n_fragments = len(fragments.nbytes)
        if sent_by is None:
            table = self._tables.fill(fragments)
        else:
            with sent_by:
                table = self._tables.fill(fragments)
            stream.wait_event(sent_by.record_event())
        for event in behind:
            stream.wait_event(event)
        words = constants(alignment(fragments), int(fragments.nbytes.max()))
        programs = (min(self.programs, n_fragments),)
        try:
            copy_fragments[programs](table.on_device, n_fragments, num_warps=WARPS, **words)
        finally:
            table.read(stream)  # its copy may be under way, whatever became of the kernel


def n_multiprocessors(device: torch.device) -> int | None:
    """Multiprocessors of a device; None where it does not say."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return (
        None if properties is None else getattr(properties(device), "multi_processor_count", None)
    )


def alignment(fragments: Fragments) -> int:
    """The largest power of two, 16 at most, that divides all addresses and sizes."""
    bits = int(np.bitwise_or.reduce([np.bitwise_or.reduce(each) for each in fragments]))
    return min(16, bits & -bits)


def constants(alignment: int, most_nbytes: int) -> dict[str, Any]:
    """The kernel's constants for pieces of some alignment, `most_nbytes` at most.

    Words are as wide as there are.
    """
    n_words = 2 if alignment == 16 else 1
    tile = next((each for each in TILES_NBYTES if each >= most_nbytes), TILES_NBYTES[-1])
    return {"WORD": WORDS[alignment], "N_WORDS": n_words, "TILE": tile // alignment}
