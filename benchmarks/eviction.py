"""The cost of the tree's size: evicting one node, matching, pinning and inserting.

Trees of 1K to 1M nodes, one page each: conversations of ten turns below one shared prompt. No
tensors: `kvgraft.tree` with ledgers alone. Conversations were grown in turns, so that neighbours in
the tree are not neighbours in memory. Nodes are evicted and as many inserted again, so that the
tree keeps its size and shape.

Matches and pins come twice: of a conversation drawn at random, and of the same once more. The first
shows what the machine's memory adds, since ten nodes out of a million are in no cache. All keys are
compared from the root.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import partial
from time import thread_time_ns

import numpy as np
from _measure import Figure, Scale, Unit, arguments, figures, grid, heading, least
from _shapes import bare_tree, grow

from kvgraft import TokenKey
from kvgraft.tree import eviction, matching, pinning
from kvgraft.tree.node import Node

SETS = (("full",), ("full", "swa", "mamba"))
SIZES = (1_000, 10_000, 100_000, 1_000_000)
DEPTH = 10
WINDOW_PAGES = 4
BATCH = 8
ROUNDS = 150
FLAT = 2.0


class Forest:
    """A tree of about `n_nodes` one-page nodes, and the timed operations."""

    def __init__(self, names: tuple[str, ...], page: int, n_nodes: int) -> None:
        self.page = page
        self.tree = bare_tree(names, page, n_nodes + BATCH, WINDOW_PAGES * page)
        self.random = random.Random(0)
        self.rng = np.random.default_rng(0)
        self.system = self.rng.integers(0, 100_000, page, dtype=np.int32)
        key = TokenKey(self.system)
        self.top = grow(self.tree, self.tree.root(None), key, 1)
        self.keys = [self.new_key() for _ in range(n_nodes // DEPTH)]
        ends: list[Node] = [self.top] * len(self.keys)
        for turn in range(DEPTH):
            for index, key in enumerate(self.keys):
                ends[index] = grow(self.tree, ends[index], key, turn + 2)
        self.fresh, self.fresh_end, self.fresh_node = self.new_key(), 1, self.top
        # A hold on the shared prompt, as running requests have one.
        self.held = pinning.acquire(self.tree, self.top)

    def new_key(self) -> TokenKey:
        key = TokenKey(self.system)
        key.extend(self.rng.integers(0, 100_000, DEPTH * self.page, dtype=np.int32))
        return key

    def evict(self, component: str, _: TokenKey) -> None:
        """One node loses the data of `component`, and the data that goes along."""
        eviction.evict_device(self.tree, self.tree.by_name[component], 1)

    def match(self, key: TokenKey) -> None:
        key.trail = None
        matching.match(self.tree, key, DEPTH + 1)

    def pin(self, key: TokenKey) -> None:
        """Pin and unpin a key's match; the match is part of the time."""
        key.trail = None
        found = matching.match(self.tree, key, DEPTH + 1)
        receipt = pinning.acquire(self.tree, matching.anchor_node(self.tree, found), touch=False)
        assert receipt is not None
        pinning.release(self.tree, receipt)

    def refill(self) -> float:
        """Insert the data that a round evicted; ns per node."""
        planned: list[tuple[TokenKey, int]] = []
        for _ in range(BATCH):
            if self.fresh_end > DEPTH:
                self.fresh, self.fresh_end = self.new_key(), 1
            self.fresh_end += 1
            planned.append((self.fresh, self.fresh_end))
        node = self.fresh_node
        start = thread_time_ns()
        for key, end in planned:
            node = grow(self.tree, node if end > 2 else self.top, key, end)
        cost = (thread_time_ns() - start) / BATCH
        self.fresh_node = node
        return cost

    def some(self) -> list[TokenKey]:
        return self.random.choices(self.keys, k=BATCH)


def timed(operation: Callable[[TokenKey], None], keys: list[TokenKey]) -> float:
    """CPU ns per call."""
    start = thread_time_ns()
    for key in keys:
        operation(key)
    return (thread_time_ns() - start) / len(keys)


def measure(
    names: tuple[str, ...], page: int, size: int, rounds: int
) -> tuple[dict[str, float], Scale]:
    """Medians in ns, by operation."""
    forest, unit = Forest(names, page, size), Unit()
    samples: dict[str, list[float]] = {}

    def sample(name: str, operation: Callable[[TokenKey], None], keys: list[TokenKey]) -> None:
        samples.setdefault(name, []).append(timed(operation, keys))

    for _ in range(rounds):
        unit.sample()
        keys = forest.some()
        sample("match, at random", forest.match, keys)
        sample("match, again", forest.match, keys)
    for _ in range(rounds):
        keys = forest.some()
        sample("match + pin + unpin, at random", forest.pin, keys)
        sample("match + pin + unpin, again", forest.pin, keys)
    for _ in range(rounds):
        unit.sample()
        sample("evict one, full", partial(forest.evict, "full"), forest.keys[:BATCH])
        samples.setdefault("insert one", []).append(forest.refill())
    # These leave nodes without data of the component, so they come last and take a tenth at most.
    for name in names[1:]:
        for _ in range(min(rounds, size // DEPTH // BATCH)):
            sample(f"evict one, {name}", partial(forest.evict, name), forest.keys[:BATCH])
    return {name: statistics.median(costs) for name, costs in samples.items()}, unit.take()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--page", type=int, default=16, help="tokens per page (default 16)")
    parser.add_argument("--rounds", type=int, help=f"rounds per size (default {ROUNDS}, quick 50)")
    given = parser.parse_args()
    rounds = given.rounds or (50 if given.quick else ROUNDS)
    sizes = SIZES[:-1] if given.quick else SIZES
    heading(
        "growth: eviction, match, pin and insert by tree size",
        page=f"{given.page} tokens, one page per node, window {WINDOW_PAGES} pages",
        tree=f"conversations of {DEPTH} nodes below a shared one",
        repetitions=f"median of {rounds} rounds of {BATCH}",
    )
    for names in SETS:
        found = {size: measure(names, given.page, size, rounds) for size in sizes}
        scale = least(scale for _, scale in found.values())
        print("unit", scale)
        rows = []
        for operation in found[sizes[0]][0]:
            costs = [found[size][0][operation] for size in sizes]
            growth = costs[-1] / costs[0]
            found_as = f"{' + '.join(names)}: {operation}, {sizes[-1]:,} nodes"
            figures([Figure("One node", found_as, costs[-1] / 1e3, units=costs[-1] / scale.unlike)])
            barred = "random" not in operation
            rows.append(
                [
                    operation,
                    *(f"{cost / 1e3:.2f}" for cost in costs),
                    *(f"{cost / scale.unlike:.2f}" for cost in (costs[0], costs[-1])),
                    f"{growth:.2f}",
                    ("ok" if growth <= FLAT else "over") if barred else "memory",
                ]
            )
        head = [
            " + ".join(names),
            *(f"{size:,} µs" for size in sizes),
            *(f"{size:,} units" for size in (sizes[0], sizes[-1])),
            "growth",
            f"<= {FLAT:g}",
        ]
        grid(head, rows)


if __name__ == "__main__":
    main()
