"""The worst request: every call of a request's life in trees of 10K, 100K and 1M nodes.

Conversations of ten turns, a page of 128 tokens a turn, in a pool that holds as many pages as the
tree is to have nodes: first it fills, then every request evicts. In lockstep every conversation has
its next turn before any has the one after; at random the next turn is drawn among all. One that had
ten turns begins anew. Times are CPU time, garbage collections included. Each tree is made in a
fresh process; at its end everything is collected once.

A turn's key is a new one: what is kept of a conversation are its tokens, in an array, so that the
collector visits nothing of the benchmark's own.

Requests are the same in every run, so a call costs the least that it took in any of them: the rest
is the machine's. The table says which request had the worst call of each kind, and whether the
collector ran in it.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
from collections.abc import Iterator
from time import thread_time_ns
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from _measure import Figure, arguments, figures, grid, heading

from kvgraft import Cache, TokenKey

SIZES = (10_000, 100_000, 1_000_000)
SETS: dict[str, dict[str, dict[str, Any]]] = {
    "full": {"full": {}},
    "full + swa + mamba": {"full": {}, "swa": {"window": 256}, "mamba": {}},
}
POLICIES = ("lru", "density")
PATTERNS = ("lockstep", "at random")
PAGE, TURNS = 128, 10
CALLS = ("begin", "admit", "allocate", "computed", "finish", "poll")
EVICTING = 20_000
SHARES = (0.5, 0.99, 0.999, 1.0)
BARS_MS = {100_000: 0.5, 1_000_000: 2.0}
COLLECTION_BAR_MS = 60


class Setup(NamedTuple):
    """A tree to be grown."""

    components: str
    policy: str
    pattern: str
    n_nodes: int


class Taken(NamedTuple):
    """One run.

    Attributes:
        spent: ns by call and request, int64 `[n_calls, n_requests]`.
        collected: generation of each collection, by call and request.
        collection: ms of a full one at the end.
    """

    spent: npt.NDArray[np.int64]
    collected: dict[tuple[int, int], int]
    collection: float


class Conversations:
    """The keys of the next turns."""

    def __init__(self, setup: Setup) -> None:
        self.n = setup.n_nodes // TURNS
        self.in_turn = setup.pattern == PATTERNS[0]
        self.random = random.Random(0)
        self.rng = np.random.default_rng(0)
        self.tokens = np.zeros((self.n, TURNS * PAGE), np.int32)
        self.turns = np.zeros(self.n, np.int64)
        self.n_keys = 0

    def next(self) -> TokenKey:
        number = self.n_keys % self.n if self.in_turn else self.random.randrange(self.n)
        self.n_keys += 1
        start = int(self.turns[number]) % TURNS * PAGE
        self.turns[number] += 1
        its = self.tokens[number, : start + PAGE]
        its[start:] = self.rng.integers(0, 100_000, PAGE, dtype=np.int32)
        return TokenKey(its)


def measure(setup: Setup) -> Taken:
    """Serve as many requests as the tree has nodes, and then as many that evict, or `EVICTING`."""
    conversations = Conversations(setup)
    n_requests = setup.n_nodes + min(setup.n_nodes, EVICTING)
    spent = np.zeros((len(CALLS), n_requests), np.int64)
    collected: dict[tuple[int, int], int] = {}
    times: list[int] = []
    number = 0

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and times:
            collected[len(times) - 1, number] = info["generation"]

    with Cache.open(
        SETS[setup.components],
        page_size=PAGE,
        device_tokens=setup.n_nodes * PAGE,
        payload=False,
        policy=setup.policy,
    ) as cache:
        gc.collect()
        gc.freeze()
        gc.callbacks.append(note)
        for number in range(n_requests):
            key = conversations.next()
            times.append(thread_time_ns())
            request = cache.begin(key)
            times.append(thread_time_ns())
            admitted = cache.admit(request).admitted
            times.append(thread_time_ns())
            assert admitted
            n_tokens = request.prompt - request.computed
            allocated = cache.allocate(request, n_tokens)
            times.append(thread_time_ns())
            assert allocated
            cache.computed(request, n_tokens)
            times.append(thread_time_ns())
            cache.finish(request)
            times.append(thread_time_ns())
            cache.poll()
            times.append(thread_time_ns())
            spent[:, number] = np.diff(times)
            times.clear()
        start = thread_time_ns()
        gc.collect()
        return Taken(spent, collected, (thread_time_ns() - start) / 1e6)


def rows_of(setup: Setup, runs: list[Taken]) -> Iterator[list[str]]:
    """The lines of one set-up."""
    spent = np.minimum.reduce([each.spent for each in runs])
    bar = BARS_MS.get(setup.n_nodes)
    for at, (call, times) in enumerate(zip(CALLS, spent / 1e6)):
        number = int(times.argmax())
        collected = [each.collected.get((at, number)) for each in runs]
        yield [
            f"  {call}",
            *(f"{each:.3f}" for each in np.quantile(times, SHARES)),
            *_verdict(times[number], bar),
            f"{number:,}",
            ", ".join(f"generation {each}" for each in collected if each is not None),
        ]
    collection = min(each.collection for each in runs)
    at_most = COLLECTION_BAR_MS if setup.n_nodes == SIZES[-1] else None
    blank = [""] * (len(SHARES) - 1)
    yield ["  full collection", *blank, f"{collection:.1f}", *_verdict(collection, at_most)]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", help="setups whose name contains this")
    parser.add_argument("--runs", type=int, default=2, help="of each set-up (default 2)")
    given = parser.parse_args()
    heading("the worst request", page=f"{PAGE} tokens", tree=f"conversations of {TURNS} turns")
    rows: list[list[str]] = []
    setups = [
        Setup(components, policy, pattern, n_nodes)
        for n_nodes in (SIZES[:1] if given.quick else SIZES)
        for components in SETS
        for policy in POLICIES
        for pattern in PATTERNS
    ]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as fresh:
        for setup in setups:
            name = f"{setup.components}, {setup.policy}, {setup.pattern}, {setup.n_nodes:,} nodes"
            if given.only is not None and given.only not in name:
                continue
            runs = [fresh.apply(measure, [setup]) for _ in range(given.runs)]
            rows += [[name], *rows_of(setup, runs)]
            worst = float(np.minimum.reduce([each.spent for each in runs]).max()) / 1e6
            figures([Figure("Worst call", name, worst, "ms")])
    shares = [f"{share:.1%}" for share in SHARES[:-1]]
    head = ["ms of CPU", *shares, "worst", "bar", "", "request", "collected"]
    grid(head, [row + [""] * (len(head) - len(row)) for row in rows])


def _verdict(value: float, bar: float | None) -> tuple[str, str]:
    return ("", "") if bar is None else (f"{bar:g}", "ok" if value <= bar else "over")


if __name__ == "__main__":
    main()
