"""Python heap per node, beyond the bytes of its key.

Every component holds data on every node of conversations of ten nodes, one page of 64 tokens or
1,024 tokens each. Two ways of counting: the growth of the process (resident set), and the bytes of
Python's allocators (`tracemalloc`). Slots, candidates and the parents' lists of children are
counted; the pools' tensors are not. Each count runs in a fresh process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tracemalloc
from typing import NamedTuple

import numpy as np
from _measure import arguments, grid, heading
from _shapes import bare_tree, grow

from kvgraft import TokenKey
from kvgraft.tree.tree import Tree

SETS = (("full",), ("full", "swa", "mamba"))
PAGE = 64
DEPTH = 10
PAGES_PER_NODE = (1, 16)
BARS = {SETS[0]: 600, SETS[1]: 1000}


class Count(NamedTuple):
    """A case to count: a component set, a node size, the number of nodes, and the method."""

    names: tuple[str, ...]
    pages: int
    n_nodes: int
    traced: bool


def populate(tree: Tree, namespace: str, n_nodes: int, pages: int) -> None:
    """Conversations of ten nodes, `pages` pages a node; their keys are dropped."""
    rng = np.random.default_rng(0)
    for _ in range(n_nodes // DEPTH):
        tokens = rng.integers(0, 100_000, DEPTH * pages * PAGE, dtype=np.int32)
        key = TokenKey(tokens, namespace)
        node = tree.root(namespace)
        for turn in range(1, DEPTH + 1):
            node = grow(tree, node, key, turn * pages)


def resident() -> int:
    """Bytes of the process in memory."""
    with open("/proc/self/statm", encoding="ascii") as counts:
        return int(counts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def traced() -> int:
    """Bytes Python's allocators have given out since tracing began."""
    return tracemalloc.get_traced_memory()[0]


def bytes_per_node(count: Count) -> float:
    """Bytes per node beyond its key's."""
    counter = traced if count.traced else resident
    warm = 100 * DEPTH
    tree = bare_tree(count.names, PAGE, (warm + count.n_nodes) * count.pages)
    populate(tree, "warm", warm, count.pages)  # imports, caches, the allocator's first arenas
    if count.traced:
        tracemalloc.start()
    gc.collect()
    before = counter()
    populate(tree, "counted", count.n_nodes, count.pages)
    gc.collect()
    grown = counter() - before
    return grown / (tree.n_nodes - warm) - count.pages * PAGE * 4


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--nodes", type=int, help="nodes per tree (default 50,000, quick 10,000)")
    given = parser.parse_args()
    n_nodes = given.nodes or (10_000 if given.quick else 50_000)
    heading(
        "memory per node",
        page=f"{PAGE} tokens",
        tree=f"{n_nodes:,} nodes, conversations of {DEPTH}",
        repetitions="one count each, in a fresh process; counts do not vary with load",
    )
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        for names in SETS:
            for pages in PAGES_PER_NODE:
                grown, handed_out = fresh.map(
                    bytes_per_node,
                    [Count(names, pages, n_nodes, way) for way in (False, True)],
                    chunksize=1,
                )
                slots = sum(4 if name == "mamba" else 4 * pages for name in names)
                rows.append(
                    [
                        f"{' + '.join(names)}, {pages * PAGE:,} tokens",
                        f"{grown:.0f}",
                        f"{handed_out:.0f}",
                        f"{slots}",
                        f"{BARS[names]}",
                        "ok" if max(grown, handed_out) <= BARS[names] else "over",
                    ]
                )
    grid(["bytes per node", "resident", "tracemalloc", "of it slots", "bar", ""], rows)


if __name__ == "__main__":
    main()
