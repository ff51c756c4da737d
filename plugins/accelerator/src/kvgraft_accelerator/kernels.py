"""A kernel that copies pieces of memory by their addresses.

One kernel gathers rows of many planes into the ring, and scatters rows of page-locked memory into
planes: both are pieces with addresses. Few programs run for long: the bus is full with little
memory in flight, and the model keeps its processors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvgraft_accelerator.fragments import Fragments
from kvgraft_accelerator.tables import Tables

__all__ = ["KernelCopies", "alignment", "constants", "copy_fragments"]

PROGRAMS = 12
"""Programs that copy at once. Others measured 95 % of the bus with as many, on an H100."""

TILE_NBYTES = 16 << 10
"""Bytes that a program has in flight."""

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
    """

    def __init__(self, device: torch.device) -> None:
        self._tables = Tables(device)
        nothing = Fragments(*np.zeros((3, 0), np.int64))
        copy_fragments[(1,)](
            self._tables.fill(nothing).on_device, 0, num_warps=WARPS, **constants(16)
        )

    def __call__(self, fragments: Fragments, stream: torch.Stream) -> None:
        """Submit them."""
        n_fragments = len(fragments.nbytes)
        table = self._tables.fill(fragments)
        words = constants(alignment(fragments))
        programs = (min(PROGRAMS, n_fragments),)
        copy_fragments[programs](table.on_device, n_fragments, num_warps=WARPS, **words)
        table.read(stream)


def alignment(fragments: Fragments) -> int:
    """The largest power of two, 16 at most, that divides all addresses and sizes."""
    bits = int(np.bitwise_or.reduce([np.bitwise_or.reduce(each) for each in fragments]))
    return min(16, bits & -bits)


def constants(alignment: int) -> dict[str, Any]:
    """The kernel's constants for pieces of some alignment: words as wide as there are."""
    n_words = 2 if alignment == 16 else 1
    return {"WORD": WORDS[alignment], "N_WORDS": n_words, "TILE": TILE_NBYTES // alignment}
