"""Paths of many nodes: a match in a deep tree, and pins on a long path.

`match` finds a path of 4,096 nodes of one token each, with a new key, from the root. `pin + unpin`
is `pinning.acquire` and `release` at the end of a path of 256 nodes of 64 tokens: where nobody else
holds it, and where another request holds the first half, or all of it.
"""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np
from _measure import Figure, Row, Unit, arguments, figures, heading, table, warm
from _shapes import grow

from kvgraft import Cache, TokenKey
from kvgraft.tree import matching, pinning

DEEP, LONG = 4096, 256
SETS: dict[str, dict[str, dict[str, int]]] = {
    "full": {"full": {}},
    "full + swa 4096 + mamba": {
        "full": {},
        "swa": {"window": 4096},
        "mamba": {"states": 2 * DEEP},
    },
}


class LongPath:
    """A cache that holds one path, each node a page, and a key that finds it."""

    def __init__(self, components: dict[str, dict[str, int]], page: int, n_nodes: int) -> None:
        tokens = page * n_nodes
        self.cache = Cache.open(components, page_size=page, device_tokens=2 * tokens)
        self.tree = self.cache.tree
        rng = np.random.default_rng(n_nodes)
        self.key = TokenKey(rng.integers(0, 100_000, tokens, dtype=np.int32))
        self.nodes = [self.tree.root(None)]
        for end in range(1, n_nodes + 1):
            self.nodes.append(grow(self.tree, self.nodes[-1], self.key, end))
        assert matching.match(self.tree, self.key, n_nodes).anchor == n_nodes

    def match(self) -> None:
        """Find it with a key that was never found before."""
        self.key.trail = None
        matching.match(self.tree, self.key, len(self.nodes) - 1)

    def pin(self) -> None:
        """Pin its end, and give the pin back."""
        receipt = pinning.acquire(self.tree, self.nodes[-1])
        assert receipt is not None
        pinning.release(self.tree, receipt)


def main() -> None:
    given = arguments(__doc__).parse_args()
    repeats = 40 if given.quick else 200
    heading("paths of many nodes", repetitions=f"median of {repeats} samples of 4 calls")
    unit = Unit()
    for name, components in SETS.items():
        deep, long = LongPath(components, 1, DEEP), LongPath(components, 64, LONG)
        operations = {
            f"match, {DEEP:,} nodes": (deep.match, 0),
            f"pin + unpin, {LONG} nodes": (long.pin, 0),
            f"pin + unpin, {LONG} nodes, half of them held": (long.pin, LONG // 2),
            f"pin + unpin, {LONG} nodes, all of them held": (long.pin, LONG),
        }
        costs: dict[str, float] = {}
        for what, (operation, held) in operations.items():
            holder = pinning.acquire(long.tree, long.nodes[held])
            assert holder is not None
            samples = []
            for _ in range(repeats):
                unit.sample()
                samples.append(warm(partial(operation)))
            costs[what] = statistics.median(samples)
            pinning.release(long.tree, holder)
        scale = unit.take()
        print("unit", scale)
        table((Row(what, cost, scale) for what, cost in costs.items()), name)
        figures(
            Figure("Long paths", f"{name}: {what}", cost / 1e3, units=cost / scale.unlike)
            for what, cost in costs.items()
        )
        deep.cache.close()
        long.cache.close()


if __name__ == "__main__":
    main()
