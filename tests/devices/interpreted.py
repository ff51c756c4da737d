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

from kvgraft.devices import PlaneCopy
from kvgraft.pools.component import run_copy
from kvgraft_accelerator import kernels
from kvgraft_accelerator.fragments import Fragmenter, Fragments

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
    expect_rows_moved()


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
    fragments = Fragments(starts + source.data_ptr(), targets + found.data_ptr(), sizes)
    assert kernels.alignment(fragments) >= alignment
    table = torch.from_numpy(np.concatenate(fragments))
    words = kernels.constants(alignment, int(sizes.max()))
    kernels.copy_fragments[(n_programs,)](table, len(sizes), num_warps=kernels.WARPS, **words)
    assert found.equal(wanted), (sizes, alignment, n_programs)


def expect_rows_moved() -> None:
    """A gather into a ring and a scatter out of slabs, as the engine asks for them."""
    planes = torch.arange(3 * 10 * 6).view(3, 10, 6)
    slabs = torch.zeros(10, 3 * 6, dtype=torch.int64)
    back = torch.zeros_like(planes)
    rows, into = torch.tensor([9, 2, 3, 7]), torch.tensor([4, 5, 6, 0])
    lanes = [slabs[:, 6 * at : 6 * at + 6] for at in range(3)]
    gather = [PlaneCopy(0, *pair, rows, into) for pair in zip(planes, lanes)]
    scatter = [PlaneCopy(0, *pair, into, rows) for pair in zip(lanes, back)]
    wanted = torch.zeros_like(planes)
    for copy in (PlaneCopy(0, *pair, rows, rows) for pair in zip(planes, wanted)):
        run_copy(copy)
    for some in (gather, scatter):
        fragments = Fragmenter().fragments(some)
        table = torch.from_numpy(np.concatenate(fragments))
        words = kernels.constants(kernels.alignment(fragments), int(fragments.nbytes.max()))
        kernels.copy_fragments[(2,)](table, len(fragments.nbytes), num_warps=1, **words)
    assert back.equal(wanted)


def widths(capability: int) -> dict[str, dict[str, list[str]]]:
    """By alignment, the kernel's loads and stores for one architecture of CUDA."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found: dict[str, dict[str, list[str]]] = {}
    for alignment, tile_nbytes in product(kernels.WORDS, kernels.TILES_NBYTES):
        words = kernels.constants(alignment, tile_nbytes)
        arguments = {"table": "*i64", "n_fragments": "i32", **dict.fromkeys(words, "constexpr")}
        source = ASTSource(
            fn=kernels.copy_fragments,
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
