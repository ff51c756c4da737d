"""Warm match and lease of 128K tokens: the cost of a request that finds its whole prefix.

The path of 131,072 tokens stands in the tree in 1, 30 or 256 nodes; the key is one page longer than
the path. It has been built, but for `key + match`, where it is built of an int32 array. `match` is
`kvgraft.tree.matching.match`; `begin + abort` is the same with pins, hooks and the request's own
books, taken and given back. The window's edge falls inside a node: the first lease splits it,
before anything is timed.

A *new* key is compared with the tree from the root, all 512 KiB. A *kept* key, that of a
conversation's next turn, remembers the node it was found at, and only the tokens behind it are
compared.
"""

from __future__ import annotations

import statistics
from functools import partial

import numpy as np
from _measure import Figure, Row, Unit, arguments, figures, heading, table, warm
from _shapes import grow

from kvgraft import Cache, TokenKey
from kvgraft.tree import matching

TOKENS = 128 * 1024
PAGE = 64
SETS: dict[str, tuple[dict[str, dict[str, int]], int]] = {
    "full": ({"full": {}}, 4),
    "full + swa 4096 + mamba": (
        {"full": {}, "swa": {"window": 4096}, "mamba": {"states": 1024}},
        7,
    ),
}
NODES = (1, 30, 256)
BARRED = 30


class Case:
    """One cache holding the path, and a key that finds it."""

    def __init__(self, components: dict[str, dict[str, int]], nodes: int) -> None:
        self.cache = Cache.open(components, page_size=PAGE, device_tokens=2 * TOKENS)
        rng = np.random.default_rng(nodes)
        self.tokens = rng.integers(0, 100_000, TOKENS + PAGE, dtype=np.int32)
        self.key = TokenKey(self.tokens)
        tree = self.cache.tree
        node = tree.root(None)
        pages = TOKENS // PAGE
        for part in range(1, nodes + 1):
            node = grow(tree, node, self.key, pages * part // nodes)
        self.lease()
        self.limit = pages
        self.found_at = self.key.trail
        found = matching.match(tree, self.key, pages)
        assert found.anchor == pages
        self.path = len(matching.follow_key(tree, self.key, pages).nodes)

    def match_prompt(self) -> None:
        """A prompt that comes as an array: its key, and the tree's part."""
        matching.match(self.cache.tree, TokenKey(self.tokens), self.limit)

    def match_new(self) -> None:
        """The tree's part alone, from the root."""
        self.key.trail = None
        matching.match(self.cache.tree, self.key, self.limit)

    def match_kept(self) -> None:
        """The tree's part alone, for a key found before."""
        self.key.trail = self.found_at
        matching.match(self.cache.tree, self.key, self.limit)

    def lease_new(self) -> None:
        """Match from the root, pin, release."""
        self.key.trail = None
        self.lease()

    def lease(self) -> None:
        """Match, pin, release; the key remembers."""
        cache = self.cache
        request = cache.begin(self.key)
        assert request.anchor_tokens == TOKENS
        cache.abort(request)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, help="samples per number (default 400, quick 80)")
    given = parser.parse_args()
    repeats = given.repeats or (80 if given.quick else 400)
    heading(
        "warm match and lease, 128K tokens",
        page=f"{PAGE} tokens",
        repetitions=f"median of {repeats} samples of 4 calls",
    )
    unit = Unit()
    for name, (components, bar) in SETS.items():
        cases = {nodes: Case(components, nodes) for nodes in NODES}
        operations = {
            "begin + abort, new key": Case.lease_new,
            "begin + abort, kept key": Case.lease,
            "key + match, new prompt": Case.match_prompt,
            "match, new key": Case.match_new,
            "match, kept key": Case.match_kept,
        }
        samples: dict[tuple[str, int], list[float]] = {}
        for _ in range(repeats):
            for nodes, case in cases.items():
                unit.sample()
                for what, operation in operations.items():
                    costs = samples.setdefault((what, nodes), [])
                    costs.append(warm(partial(operation, case)))
        scale = unit.take()
        print("unit", scale)
        table(
            (
                Row(
                    f"{what}, {nodes} nodes (path now {cases[nodes].path})",
                    statistics.median(samples[what, nodes]),
                    scale,
                    bar if nodes == BARRED and "prompt" not in what else None,
                )
                for what in operations
                for nodes in NODES
            ),
            name,
        )
        figures(
            Figure(
                "128K tokens found again",
                f"{name}: {what}, {nodes} nodes",
                statistics.median(costs) / 1e3,
                units=statistics.median(costs) / scale.unlike,
                bars=(bar, bar) if nodes == BARRED and "new key" in what else (None, None),
            )
            for (what, nodes), costs in samples.items()
            if nodes >= BARRED
        )
        for case in cases.values():
            case.cache.close()


if __name__ == "__main__":
    main()
