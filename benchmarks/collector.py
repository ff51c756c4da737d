"""Pauses of Python's garbage collector: a full collection while a tree is large.

Every component holds data on every node of conversations of ten nodes, a page of 64 tokens each;
candidates of the policy `lru` wait in their queues. What was there before the tree is frozen, as
`gc.freeze` does at an engine's start, so a pause is the tree's own. Each tree is made in a fresh
process.
"""

from __future__ import annotations

import gc
import multiprocessing
from time import thread_time_ns
from typing import NamedTuple

from _measure import Figure, arguments, figures, grid, heading
from _shapes import bare_tree
from memory import DEPTH, PAGE, SETS, populate

SIZES = (100_000, 1_000_000)
QUICK_SIZES = (20_000,)
BAR_MS = 150
COLLECTIONS = 5


class Count(NamedTuple):
    """A tree to collect beside: its components, and how many nodes it has."""

    names: tuple[str, ...]
    n_nodes: int


class Pause(NamedTuple):
    """A full collection: its least time in ms, and the tree's objects that it visits, by node."""

    ms: float
    tracked: float


def pause(count: Count) -> Pause:
    """Collect all generations beside a tree."""
    tree = bare_tree(count.names, PAGE, count.n_nodes)
    populate(tree, "warm", DEPTH, 1)  # imports and caches
    gc.collect()
    gc.freeze()
    populate(tree, "counted", count.n_nodes - DEPTH, 1)
    spent = []
    for _ in range(COLLECTIONS):
        start = thread_time_ns()
        gc.collect()
        spent.append(thread_time_ns() - start)
    return Pause(min(spent) / 1e6, len(gc.get_objects()) / tree.n_nodes)


def main() -> None:
    given = arguments(__doc__).parse_args()
    heading(
        "full collections",
        page=f"{PAGE} tokens",
        tree=f"conversations of {DEPTH} nodes",
        repetitions=f"least of {COLLECTIONS} collections",
    )
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        for n_nodes in QUICK_SIZES if given.quick else SIZES:
            for names in SETS:
                took = fresh.apply(pause, [Count(names, n_nodes)])
                bar, verdict = "", ""
                if n_nodes == SIZES[-1]:
                    bar, verdict = f"{BAR_MS}", "ok" if took.ms <= BAR_MS else "over"
                name = f"{' + '.join(names)}, {n_nodes:,} nodes"
                figures([Figure("Full garbage collection", name, took.ms, "ms")])
                rows.append([name, f"{took.ms:.1f}", f"{took.tracked:.3f}", bar, verdict])
    grid(["full collection", "ms", "objects per node", "bar", ""], rows)


if __name__ == "__main__":
    main()
