"""A decode step of all running requests: `Cache.step` beside a loop over the requests.

256 requests of 8,192 tokens decode, page tables included. Every request of the loop extends its
key, allocates, reads its table of every paged component and notes what was computed; a step does
that for all in one call. A step with 4 drafts has slots for those as well, of which none is right.
All decode in turn, over caches of their own: periods of 64 tokens, in which each thing that comes
once per 64 tokens or page comes once. The cost of a step is the least of that step over the
periods; the table has the mean over a period's steps, by request, and its dearest and cheapest
step. Before them is the first pass: in it all requests join the batch, and their prompts' last data
goes to the tree.

Then requests join others, and take the rows of some that ended: the table has how many µs more such
a step costs for each than one without them, the least of some rounds. The aim is 10 more than
the dearest step.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from time import thread_time_ns
from typing import Any, NamedTuple

import numpy as np
from _measure import Figure, arguments, figures, grid, heading

from kvgraft import Cache, Request, TokenKey

PERIOD = 64
PERIODS = 8
JOINING = 16
ROUNDS = 6
DRAFTS = 4
SEED = 0


class Served(NamedTuple):
    """One component set.

    Attributes:
        name: for the table.
        components: their options.
        page_size: tokens per page.
        bar: most µs per request and step of a compiled build; the plain one may take twice that.
    """

    name: str
    components: dict[str, dict[str, Any]]
    page_size: int
    bar: float


THREE: dict[str, dict[str, Any]] = {"full": {}, "swa": {"window": 1024}, "mamba": {"states": 2048}}

SETS = (
    Served("full, page 64", {"full": {}}, 64, 0.6),
    Served("full + swa 1024 + mamba, page 64", THREE, 64, 0.8),
    Served("full, page 1", {"full": {}}, 1, 1.0),
    Served("full + swa 1024 + mamba, page 1", THREE, 1, 1.5),
)


class Engine:
    """Requests that decode in one cache."""

    def __init__(
        self, served: Served, n_requests: int, n_tokens: int, n_steps: int, n_drafts: int = 0
    ) -> None:
        rng = np.random.default_rng(SEED)
        self.cache = Cache.open(
            served.components,
            page_size=served.page_size,
            device_tokens=n_requests * (n_tokens + n_steps + 512),
            max_requests=n_requests,
            max_tokens=n_tokens + n_steps,
            max_drafts=n_drafts,
            payload=False,
        )
        self.n_drafts = n_drafts
        self.kept = np.zeros(n_requests, np.int64)
        self.paged = [name for name in served.components if name != "mamba"]
        self.tokens = rng.integers(0, 100_000, (n_requests, 1), dtype=np.int32)
        self.requests = [self.prefilled(rng, n_tokens, n_steps) for _ in range(n_requests)]

    def prefilled(self, rng: np.random.Generator, n_tokens: int, n_steps: int) -> Request:
        key = TokenKey(rng.integers(0, 100_000, n_tokens, dtype=np.int32))
        request = self.cache.begin(key, reserve=n_steps)
        assert self.cache.admit(request).admitted
        while request.computed < request.prompt:
            chunk = self.cache.next_chunk(request)
            assert self.cache.allocate(request, chunk)
            self.cache.computed(request, chunk)
        return request

    def loop(self) -> None:
        """One pass, request by request."""
        cache = self.cache
        for request, (token,) in zip(self.requests, self.tokens.tolist()):
            request.key.extend([token])
            assert cache.allocate(request, 1)
            for name in self.paged:
                cache.table(request, name)
        for request in self.requests:
            cache.computed(request, 1)

    def step(self) -> None:
        """One pass, all together."""
        tokens = self.tokens[: len(self.requests)]
        assert not self.cache.step(self.requests, tokens).refused

    def drafted(self) -> None:
        """One pass with drafts, all together; of the last one's none was right."""
        step = self.cache.step(
            self.requests, self.tokens, n_drafts=self.n_drafts, n_computed=self.kept
        )
        assert not step.refused
        self.kept[:] = 1


def spent(run: Callable[[], None]) -> int:
    """The ns of a call."""
    start = thread_time_ns()
    run()
    return thread_time_ns() - start


def joining(served: Served, n_tokens: int) -> float:
    """µs that a request's first step costs, where it joins others."""
    n_steps = 4 * ROUNDS
    engine = Engine(served, 2 * JOINING, n_tokens, n_steps)
    engine.step()
    rng = np.random.default_rng(SEED + 1)
    alone: list[int] = []
    joined: list[int] = []
    for _ in range(ROUNDS):
        for request in engine.requests[JOINING:]:
            engine.cache.finish(request)
        del engine.requests[JOINING:]
        waiting = [engine.prefilled(rng, n_tokens, n_steps) for _ in range(JOINING)]
        alone += [spent(engine.step), spent(engine.step)]
        engine.requests += waiting
        joined.append(spent(engine.step))
    engine.cache.check_integrity()
    engine.cache.close()
    return (min(joined) - min(alone)) / JOINING / 1e3


def period(run: Callable[[], None]) -> list[int]:
    """The ns of each step of one period."""
    return [spent(run) for _ in range(PERIOD)]


def measure(
    served: Served, n_requests: int, n_tokens: int, periods: int
) -> dict[str, tuple[float, float, float, float]]:
    """µs of the first pass; mean, least and most of the others, by name of the way."""
    n_steps = PERIOD * (periods + 1)
    looped = Engine(served, n_requests, n_tokens, n_steps)
    stepped = Engine(served, n_requests, n_tokens, n_steps)
    drafted = Engine(served, n_requests, n_tokens, n_steps, DRAFTS)
    gc.collect()
    runs = {"loop": looped.loop, "step": stepped.step, "with drafts": drafted.drafted}
    first = {name: period(run)[0] / n_requests / 1e3 for name, run in runs.items()}
    found: dict[str, list[list[int]]] = {name: [] for name in runs}
    for _ in range(periods):
        for name, run in runs.items():
            found[name].append(period(run))
    costs = {}
    for name, periods_of in found.items():
        least = [min(step) / n_requests / 1e3 for step in zip(*periods_of)]
        costs[name] = (first[name], statistics.fmean(least), min(least), max(least))
    looped.cache.close()
    for engine in (stepped, drafted):
        engine.cache.check_integrity()
        engine.cache.close()
    return costs


def main() -> None:
    parser = arguments(__doc__)
    given = parser.parse_args()
    n_requests, n_tokens = (32, 2048) if given.quick else (256, 8192)
    periods = 2 if given.quick else PERIODS
    heading(
        "a decode step",
        requests=f"{n_requests} of {n_tokens:,} tokens",
        repetitions=f"least of {periods} periods of {PERIOD} steps, loop and steps in turn",
        unit="µs per request and step, page tables included",
    )
    rows: list[list[str]] = []
    for served in SETS:
        join = joining(served, n_tokens)
        for name, costs in measure(served, n_requests, n_tokens, periods).items():
            bars = (2 * served.bar, served.bar) if name == "step" else (None, None)
            told = ["" if bar is None else f"{bar:g}" for bar in reversed(bars)]
            more = f"{join:.1f}" if name == "step" else ""
            shown = [f"{cost:.2f}" for cost in costs]
            rows.append([f"{served.name}: {name}", *shown, more, *told])
            setting = f"{served.name}: {name}"
            figures(
                [
                    Figure("A decode step of a request", setting, costs[1], bars=bars),
                    Figure("A request's first decode step", setting, costs[0]),
                ]
            )
    grid(["", "first", "mean", "least", "most", "joins", "bar, compiled", "bar, plain"], rows)


if __name__ == "__main__":
    main()
