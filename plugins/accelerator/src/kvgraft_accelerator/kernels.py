"""A kernel that copies rows of several planes, or pieces of memory, by their addresses.

It gathers rows of many planes into a ring and scatters rows of a ring into planes. It computes the
address of each piece itself: the host sends one number for each row, instead of one for each row
and plane. Pieces of any addresses are rows of one byte of a plane that covers all memory. It
launches one program for each multiprocessor, so the model waits for one wave of it at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvgraft_accelerator.fragments import Fragments, Numbers, Rows
from kvgraft_accelerator.tables import Tables

__all__ = [
    "KernelCopies",
    "alignment",
    "constants",
    "copy_rows",
    "n_multiprocessors",
    "planes_of",
]

PROGRAMS = 32
"""Programs on a device that does not report its number of multiprocessors."""

TILES_NBYTES = (4 << 10, 16 << 10)
"""Bytes that a program has in flight: the smallest tile that holds every piece, or the largest.
"""

WARPS = 8

MOST_KNOWN = 64
"""Sets of planes that are kept on the device, for each stream that reads them."""

WORDS = {16: tl.int64, 8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.uint8}
"""The type of the words that are moved, by alignment in bytes."""


@triton.jit(do_not_specialize=["n_planes", "rows", "n_rows"])  # type: ignore[untyped-decorator]
def copy_rows(  # type: ignore[no-untyped-def]
    planes,
    n_planes,
    rows,
    n_rows,
    WORD: tl.constexpr,  # noqa: N803
    N_WORDS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Copy rows of all planes.

    Pieces are in the order of the rows. Each program takes an equal run of them (the last ones
    fewer), so it reads the numbers of few rows, which lie in host memory.

    Args:
        planes: `Rows.planes` on the device.
        n_planes: how many.
        rows: address of the rows' numbers, int64 `[3 * n_rows]`: sources, targets, lengths.
        n_rows: how many.
        WORD: type of the words that are moved.
        N_WORDS: words that a thread moves at once, side by side.
        TILE: groups of N_WORDS words that a program moves at once.
    """
    nbytes_of_group: tl.constexpr = N_WORDS * WORD.primitive_bitwidth // 8
    groups = tl.arange(0, TILE)[:, None]
    words = tl.arange(0, N_WORDS)[None, :]
    numbers = rows.to(tl.pointer_type(tl.int64))
    n_pieces = n_planes * n_rows
    share = tl.cdiv(n_pieces, tl.num_programs(0))
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, n_pieces)
    for row in range(begin // n_planes, tl.cdiv(end, n_planes)):
        source_row = tl.load(numbers + row)
        target_row = tl.load(numbers + n_rows + row)
        length = tl.load(numbers + 2 * n_rows + row)
        first_plane = tl.maximum(begin - row * n_planes, 0)
        for plane in range(first_plane, tl.minimum(end - row * n_planes, n_planes)):
            source = tl.load(planes + plane)
            target = tl.load(planes + n_planes + plane)
            source += source_row * tl.load(planes + 2 * n_planes + plane)
            target += target_row * tl.load(planes + 3 * n_planes + plane)
            n_groups = length * tl.load(planes + 4 * n_planes + plane) // nbytes_of_group
            read = tl.multiple_of(source.to(tl.pointer_type(WORD)), nbytes_of_group)
            write = tl.multiple_of(target.to(tl.pointer_type(WORD)), nbytes_of_group)
            for first in range(0, n_groups, TILE):
                here = (first + groups) * N_WORDS + words
                there = first + groups < n_groups
                moved = tl.load(read + here, mask=there, cache_modifier=".cg")
                tl.store(write + here, moved, mask=there)


class Planes(NamedTuple):
    """The planes whose rows are copied.

    Attributes:
        numbers: `Rows.planes`; the reference keeps its `id`.
        on_device: the same on the device.
        alignments: the largest powers of two that divide all first addresses, all steps of the
            source, all steps of the target, and all widths.
        most_nbytes: bytes of the largest row.
    """

    numbers: Numbers
    on_device: torch.Tensor
    alignments: tuple[int, ...]
    most_nbytes: int


class KernelCopies:
    """Copies by the kernel; see `RowsWay`.

    The constructor compiles it for pieces of whole 16 bytes; for others it is compiled at their
    first copy.

    Args:
        device: device on which it runs.
        page_locked: see `Tables`.

    Attributes:
        ALL_MEMORY: `Rows.planes` of one plane whose rows are bytes at any address. It is not a
            name of the module: the interpreter of Triton before 3.3 compares these.
        programs: how many copy at once.
    """

    ALL_MEMORY: ClassVar[Numbers] = np.array([[0], [0], [1], [1], [1]], np.int64)

    def __init__(self, device: torch.device, page_locked: Callable[[int], torch.Tensor]) -> None:
        self.programs = n_multiprocessors(device) or PROGRAMS
        self._device = device
        self._tables = Tables(page_locked)
        self._known: dict[tuple[int, int], Planes] = {}
        for tile_nbytes in TILES_NBYTES:
            planes = torch.zeros(self.ALL_MEMORY.size, dtype=torch.int64, device=device)
            rows = self._tables.fill([np.zeros(0, np.int64)])
            words = constants(16, tile_nbytes)
            copy_rows[(1,)](planes, 1, rows.address, 0, num_warps=WARPS, **words)

    def __call__(self, fragments: Fragments, stream: torch.Stream) -> None:
        """Submit pieces; see `Way`."""
        self.move_rows(Rows(self.ALL_MEMORY, *fragments), stream)

    def move_rows(self, rows: Rows, stream: torch.Stream) -> None:
        """Submit rows; see `RowsWay`."""
        planes = self._planes(rows.planes, stream)
        words = constants(alignment(planes, rows), planes.most_nbytes * int(rows.lengths.max()))
        n_planes, n_rows = rows.planes.shape[1], len(rows.sources)
        programs = (min(self.programs, n_planes * n_rows),)
        table = self._tables.fill(rows[1:])
        try:
            copy_rows[programs](
                planes.on_device, n_planes, table.address, n_rows, num_warps=WARPS, **words
            )
        finally:
            table.read(stream)

    def _planes(self, numbers: Numbers, stream: torch.Stream) -> Planes:
        """Planes as one stream reads them; they are sent to the device the first time."""
        key = id(numbers), stream.stream_id
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            on_device = torch.empty(numbers.size, dtype=torch.int64, device=self._device)
            table = self._tables.fill([numbers.ravel()])
            try:
                on_device.copy_(table.memory[: numbers.size], non_blocking=True)
            finally:
                table.read(stream)
            self._known[key] = planes_of(numbers, on_device)
        return self._known[key]


def planes_of(numbers: Numbers, on_device: torch.Tensor) -> Planes:
    """Put planes on the device, and find their alignment."""
    alignments = power_of_two(numbers[:2]), *map(power_of_two, numbers[2:])
    return Planes(numbers, on_device, alignments, int(numbers[4].max()))


def n_multiprocessors(device: torch.device) -> int | None:
    """Number of multiprocessors of a device; None if it does not report that."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    return (
        None if properties is None else getattr(properties(device), "multi_processor_count", None)
    )


def power_of_two(numbers: Numbers) -> int:
    """The largest power of two that divides all of them; 0 if all are 0."""
    bits = int(np.bitwise_or.reduce(numbers, axis=None))
    return bits & -bits


def alignment(planes: Planes, rows: Rows) -> int:
    """A power of two, 16 at most, that divides all addresses and sizes of the pieces.

    The largest for pieces of any addresses.
    """
    bits, *steps = planes.alignments
    for step, numbers in zip(steps, rows[1:]):
        bits |= step * power_of_two(numbers)
    return min(16, bits & -bits)


def constants(alignment: int, most_nbytes: int) -> dict[str, Any]:
    """The kernel's constants for pieces of some alignment, `most_nbytes` at most.

    Words are as wide as the alignment allows.
    """
    n_words = 2 if alignment == 16 else 1
    tile = next((each for each in TILES_NBYTES if each >= most_nbytes), TILES_NBYTES[-1])
    return {"WORD": WORDS[alignment], "N_WORDS": n_words, "TILE": tile // alignment}
