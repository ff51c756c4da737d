"""Python heap per node, beyond the bytes of its key.

Trees with `full`, `swa` and `mamba`, every component holding data on every node: conversations of
ten nodes, one page of 64 tokens each or 1,024 tokens. Two ways of counting: what the process grew
by (resident set, garbage and allocator slack included), and what Python's allocator handed out
(`tracemalloc`). Slots are part of the heap; the pools' tensors and the lists of free slots are not.
"""

from __future__ import annotations

import gc
import os
import tracemalloc
from collections.abc import Callable

import numpy as np
from _measure import arguments, grid, heading
from _shapes import bare_tree, grow

from kvgraft import TokenKey
from kvgraft.tree.tree import Tree

SETS = (("full",), ("full", "swa", "mamba"))
PAGE = 64
DEPTH = 10
PAGES_PER_NODE = (1, 16)
BAR = 1024


def populate(tree: Tree, n_nodes: int, pages: int) -> None:
    """Conversations of ten nodes each, `pages` pages a node; their keys are dropped."""
    rng = np.random.default_rng(0)
    for _ in range(n_nodes // DEPTH):
        key = TokenKey(rng.integers(0, 100_000, DEPTH * pages * PAGE, dtype=np.int32))
        node = tree.root(None)
        for turn in range(1, DEPTH + 1):
            node = grow(tree, node, key, turn * pages)


def resident() -> int:
    """Bytes of the process in memory."""
    with open("/proc/self/statm", encoding="ascii") as counts:
        return int(counts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def growth(counter: Callable[[], int], names: tuple[str, ...], n_nodes: int, pages: int) -> float:
    """Bytes per node that `counter` grew by, less the key's own."""
    tree = bare_tree(names, PAGE, n_nodes * pages)
    populate(tree, DEPTH, pages)  # the allocator's first arenas, imports, caches
    made = tree.n_nodes
    gc.collect()
    before = counter()
    populate_more = n_nodes - DEPTH
    _populate_other(tree, populate_more, pages)
    gc.collect()
    used = counter() - before
    return used / (tree.n_nodes - made) - pages * PAGE * 4


def _populate_other(tree: Tree, n_nodes: int, pages: int) -> None:
    """The same in another namespace, so that nothing is shared with what was there."""
    rng = np.random.default_rng(1)
    root = tree.root("other")
    for _ in range(n_nodes // DEPTH):
        tokens = rng.integers(0, 100_000, DEPTH * pages * PAGE, dtype=np.int32)
        key = TokenKey(tokens, "other")
        node = root
        for turn in range(1, DEPTH + 1):
            node = grow(tree, node, key, turn * pages)
