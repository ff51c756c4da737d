"""The cost of an eviction policy's order by its number of candidates: take one, enter another.

Candidates are slots of a pool that is full, each used once; the next victim makes room for one that
is entered as used now, or, one in three, as used half a stay ago: a parent that inherits its
child's use. `density` has learnt from eight classes of prefixes before; windows and states are
ordered by what their loss costs.
"""

from __future__ import annotations

import random
import statistics
from time import thread_time_ns

from _measure import Unit, arguments, grid, heading

from kvgraft.policies import EvictionPolicy
from kvgraft.policies.policy import CLASS_BITS
from kvgraft.policies.recency import LeastRecentlyUsed
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.tree.ledger import Ledger
from kvgraft.types import Tier
from kvgraft_density.learning import N_BINS, Rates
from kvgraft_density.policy import COARSER, Density

SIZES = (1_000, 10_000, 100_000, 1_000_000)
N_CLASSES = 8
BATCH = 100
ROUNDS = 500
FLAT = 2.0


class Bench:
    """One order with as many candidates as its pool has slots."""

    def __init__(self, policy: str, size: int) -> None:
        pool = Ledger("full", Tier.DEVICE, SlotAllocator(size))
        self.density: Density | None = None
        self.random = random.Random(0)
        self.size, self.stamp = size, 0
        if policy == "windows and states":
            pool.cost = lambda node: node * 2654435761 % 65536
        made: EvictionPolicy = LeastRecentlyUsed() if policy == "lru" else Density()
        self.order = made.order(pool)
        made.opened(size)
        self.density = made if isinstance(made, Density) else None
        for _ in range(size):
            self.enter(0)
        if self.density is not None:
            self.learn(self.density)

    def learn(self, density: Density) -> None:
        """Data of half of the classes comes back soon, that of the others late."""
        for each in range(N_CLASSES):
            density.prefixes.reached[each] = [1000 >> number // 2 for number in range(N_BINS)]
            density.prefixes.reused[each] = [
                (400 if (number < 6) is bool(each % 2) else 40) // (each + 1) >> number // 2
                for number in range(N_BINS)
            ]
        rates = Rates(density.prefixes, COARSER)
        for order in density.orders:
            order.learn(rates)

    def enter(self, uses_ago: int) -> None:
        self.stamp += 1
        if self.density is not None:
            self.density.clock.note(self.stamp << CLASS_BITS, self.stamp)
        use = max(0, self.stamp - uses_ago)
        its_class = use * 2654435761 >> 7 & N_CLASSES - 1
        self.order.push(use << CLASS_BITS | its_class, self.stamp)

    def turn_over(self) -> float:
        """CPU ns for each candidate taken and entered; the stamps and clock included."""
        agos = [self.size // 2 if self.random.random() < 1 / 3 else 0 for _ in range(BATCH)]
        start = thread_time_ns()
        for ago in agos:
            self.order.pop()
            self.enter(ago)
        return (thread_time_ns() - start) / BATCH


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, help=f"rounds per size (default {ROUNDS}, quick 50)")
    given = parser.parse_args()
    rounds = given.rounds or (50 if given.quick else ROUNDS)
    sizes = SIZES[:-1] if given.quick else SIZES
    heading(
        "growth: taking and entering a candidate, by eviction policy",
        repetitions=f"median of {rounds} rounds of {BATCH}",
    )
    unit, rows = Unit(), []
    for policy in ("lru", "density", "windows and states"):
        costs = []
        for size in sizes:
            bench = Bench(policy, size)
            unit.sample()
            costs.append(statistics.median(bench.turn_over() for _ in range(rounds)))
        growth = costs[-1] / costs[0]
        verdict = "ok" if growth <= FLAT else "over"
        rows.append([policy, *(f"{cost / 1e3:.2f}" for cost in costs), f"{growth:.2f}", verdict])
    print("unit", unit.take())
    grid(["", *(f"{size:,} µs" for size in sizes), "growth", f"<= {FLAT:g}"], rows)


if __name__ == "__main__":
    main()
