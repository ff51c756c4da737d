"""The kernel in Triton's interpreter and its compiler, in a process of its own.

TRITON_INTERPRET=1 python -m tests.devices.interpreted copies      # bytes, bounds, tables
python -m tests.devices.interpreted ptx 80 90                      # widths of accesses, as JSON
"""

from __future__ import annotations

import json
import re
import sys
from itertools import product

import numpy as np
import numpy.typing as npt
import torch

from kvgraft_accelerator import kernels
from kvgraft_accelerator.fragments import Rows

__all__ = ["copies", "widths"]

GUARD = 64
"""Bytes around every memory that must stay as they are."""


def copies() -> None:
    """Pieces of every alignment and of odd sizes: all bytes move, and none beside them."""
    draw = np.random.default_rng(5)
    for alignment in (16, 8, 4, 2, 1):
        for n_programs, n in ((1, 1), (3, 2), (3, 7)):
            sizes = alignment * draw.integers(0, 40, n)
            expect_moved(sizes, alignment, n_programs)
            sizes[-1] = 3 * kernels.TILES_NBYTES[-1] // 2 // alignment * alignment  # two tiles
            expect_moved(sizes, alignment, n_programs)
        for n_programs, n_planes, n in ((1, 1, 5), (4, 3, 5), (16, 5, 3), (7, 1, 9)):
            expect_rows_moved(alignment, n_programs, n_planes, n)
    expect_runs_moved()


def expect_moved(sizes: npt.NDArray[np.int64], alignment: int, n_programs: int) -> None:
    """The pieces of some sizes lie apart in both memories, in another order."""
    steps = sizes + 2 * alignment
    starts = GUARD + np.cumsum(steps) - steps
    order = np.argsort(-sizes, kind="stable")
    targets = np.empty_like(starts)
    targets[order] = GUARD + np.cumsum(steps[order]) - steps[order]
    nbytes = int(steps.sum()) + 2 * GUARD
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    found, wanted = torch.zeros_like(source), torch.zeros_like(source)
    for read, write, size in zip(starts, targets, sizes):
        wanted[write : write + size] = source[read : read + size]
    pieces = starts + source.data_ptr(), targets + found.data_ptr(), sizes
    move(Rows(kernels.KernelCopies.ALL_MEMORY, *pieces), alignment, n_programs)
    assert found.equal(wanted), (sizes, alignment, n_programs)


def move(rows: Rows, least_alignment: int, n_programs: int) -> None:
    """Run the kernel once, as `KernelCopies` does."""
    planes = kernels.planes_of(rows.planes, torch.from_numpy(np.ascontiguousarray(rows.planes)))
    found = kernels.alignment(planes, rows)
    assert found >= least_alignment
    for each in rows.fragments():
        assert not (each % found).any()
    table = np.concatenate(rows[1:])
    words = kernels.constants(found, planes.most_nbytes * int(rows.lengths.max()))
    kernels.copy_rows[(n_programs,)](
        planes.on_device,
        rows.planes.shape[1],
        table.ctypes.data,
        len(rows.sources),
        num_warps=kernels.WARPS,
        **words,
    )


def expect_rows_moved(alignment: int, n_programs: int, n_planes: int, n: int) -> None:
    """Planes of several widths are gathered into slabs and scattered to other rows."""
    draw = np.random.default_rng(n_planes)
    widths = alignment * draw.integers(1, 30, n_planes)
    steps = widths + alignment * draw.integers(0, 3, n_planes)
    memory = torch.randint(0, 256, (2, GUARD + int(steps.sum()) * 12), dtype=torch.uint8)
    memory[1] = 0
    before = GUARD + 12 * (np.cumsum(steps) - steps)
    stride = int(widths.sum()) + alignment
    ring = torch.zeros(GUARD + n * stride, dtype=torch.uint8)
    rows, into = (draw.permutation(12)[:n] for _ in range(2))
    places = ring.data_ptr() + GUARD + stride * np.arange(n)
    starts, ones = np.cumsum(widths) - widths, np.ones(n_planes, np.int64)
    source, target = (before + each.data_ptr() for each in memory)
    gather = np.stack([source, starts, steps, ones, widths])
    scatter = np.stack([starts, target, ones, steps, widths])
    lengths = np.ones(n, np.int64)
    move(Rows(gather, rows, places, lengths), alignment, n_programs)
    move(Rows(scatter, places, into, lengths), alignment, n_programs)
    wanted = torch.zeros_like(memory[0])
    lying = torch.zeros_like(ring)
    for first, step, width, start in zip(before, steps, widths, starts):
        for at, (row, to) in enumerate(zip(rows, into)):
            piece = memory[0, first + step * row :][:width]
            wanted[first + step * to :][:width] = piece
            lying[GUARD + stride * at + start :][:width] = piece
    assert ring.equal(lying), (alignment, n_programs, n_planes, n)
    assert memory[1].equal(wanted), (alignment, n_programs, n_planes, n)


def expect_runs_moved() -> None:
    """Rows that follow one another in all planes, on both sides, are one piece of each plane."""
    source = torch.arange(3 * 10 * 6).view(3, 10, 6)
    found, wanted = torch.zeros_like(source), torch.zeros_like(source)
    table = [[each.data_ptr() for each in planes] for planes in (source, found)]
    table += [[48] * 3] * 3
    runs = [np.array(each) for each in ([1, 7], [6, 0], [4, 2])]
    move(Rows(np.array(table, np.int64), *runs), 8, 2)
    wanted[:, 6:10], wanted[:, 0:2] = source[:, 1:5], source[:, 7:9]
    assert found.equal(wanted)


def widths(capability: int) -> dict[str, dict[str, list[str]]]:
    """By alignment, the kernel's loads and stores for one architecture of CUDA."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found: dict[str, dict[str, list[str]]] = {}
    for alignment, tile_nbytes in product(kernels.WORDS, kernels.TILES_NBYTES):
        words = kernels.constants(alignment, tile_nbytes)
        numbers = {"planes": "*i64", "n_planes": "i32", "rows": "i64", "n_rows": "i32"}
        arguments = {**numbers, **dict.fromkeys(words, "constexpr")}
        source = ASTSource(
            fn=kernels.copy_rows,
            signature=arguments,
            constexprs=words,
            attrs={(0,): [["tt.divisibility", 16]]},
        )
        target = GPUTarget("cuda", capability, 32)
        made = triton.compile(source, target=target, options={"num_warps": kernels.WARPS})
        assert made.asm["cubin"]
        of_alignment = found.setdefault(str(alignment), {"ld": [], "st": []})
        for kind, widths in of_alignment.items():
            these = re.findall(rf"\b{kind}\.global\.(\S+)", made.asm["ptx"])
            widths[:] = sorted({*widths, *these})
    return found


if __name__ == "__main__":
    if sys.argv[1] == "copies":
        copies()
    else:
        sys.stdout.write(json.dumps({each: widths(int(each)) for each in sys.argv[2:]}))
