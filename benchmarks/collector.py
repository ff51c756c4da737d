"""Pauses of Python's garbage collector: a full collection while a tree is large.

Every component holds data on every node of conversations of ten nodes, a page of 64 tokens each;
candidates of the policy `lru` wait in their queues. Beside the trees is a `Cache` with the default
policy, which remembers prefixes: its conversations have ten requests of 256 new tokens. What was
there before is frozen, as `gc.freeze` does at an engine's start, so a pause is the tree's or the
cache's own. Each is made in a fresh process.
"""

from __future__ import annotations

import gc
import multiprocessing
from time import thread_time_ns
from typing import NamedTuple

import numpy as np
from _measure import Figure, arguments, figures, grid, heading
from _shapes import bare_tree
from memory import DEPTH, PAGE, SETS, populate

from kvgraft import Cache, TokenKey

SIZES = (100_000, 1_000_000)
QUICK_SIZES = (20_000,)
BAR_MS = 60
TURN_TOKENS = 256
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
    return collected(tree.n_nodes)


def serve(cache: Cache, n_nodes: int) -> None:
    """Conversations of ten requests; their keys are dropped."""
    rng = np.random.default_rng(0)
    for _ in range(n_nodes // DEPTH):
        key = TokenKey()
        for _ in range(DEPTH):
            key.extend(rng.integers(0, 100_000, TURN_TOKENS, dtype=np.int32))
            request = cache.begin(key)
            assert cache.admit(request).admitted
            n_tokens = request.prompt - request.computed
            assert cache.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
            cache.finish(request)


def pause_of_cache(count: Count) -> Pause:
    """Collect all generations beside a cache with the default policy."""
    components = {name: {"window": PAGE} if name == "swa" else {} for name in count.names}
    n_tokens = count.n_nodes * TURN_TOKENS
    with Cache.open(
        components, page_size=TURN_TOKENS, device_tokens=n_tokens, payload=False
    ) as cache:
        serve(cache, DEPTH)
        gc.collect()
        gc.freeze()
        serve(cache, count.n_nodes - DEPTH)
        return collected(cache.tree.n_nodes)


def collected(n_nodes: int) -> Pause:
    """Collect all generations, several times."""
    spent = []
    for _ in range(COLLECTIONS):
        start = thread_time_ns()
        gc.collect()
        spent.append(thread_time_ns() - start)
    return Pause(min(spent) / 1e6, len(gc.get_objects()) / n_nodes)


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
            for names, way in [*((each, pause) for each in SETS), (SETS[-1], pause_of_cache)]:
                took = fresh.apply(way, [Count(names, n_nodes)])
                bar, verdict = "", ""
                if n_nodes == SIZES[-1]:
                    bar, verdict = f"{BAR_MS}", "ok" if took.ms <= BAR_MS else "over"
                of = "a cache of " if way is pause_of_cache else ""
                name = f"{of}{' + '.join(names)}, {n_nodes:,} nodes"
                figures([Figure("Full garbage collection", name, took.ms, "ms")])
                rows.append([name, f"{took.ms:.1f}", f"{took.tracked:.3f}", bar, verdict])
    grid(["full collection", "ms", "objects per node", "bar", ""], rows)


if __name__ == "__main__":
    main()
