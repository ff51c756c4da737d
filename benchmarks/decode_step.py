"""A decode step of all running requests: `Cache.step` beside a loop over the requests.

256 requests of 8,192 tokens decode, page tables included. Every request of the loop extends its
key, allocates, reads its table of every paged component and notes what was computed; a step does
that for all in one call. A step with 4 drafts has slots for those as well: none is right, or each
pass keeps 3 tokens, which the engine adds to the keys outside of the step. Beside the latter are
steps of 3 tokens without drafts, added likewise.

All decode in turn, over caches of their own: periods of 64 tokens a request, or of 192 where passes
keep 3, in which each thing that comes once per 64 tokens or page comes as often. The cost of a step
is the least of that step over the periods; the table has the mean over a period's steps, by
request, its cheapest and its dearest step, the mean by token, and relative to a step of as many
tokens without drafts. Before them is the first pass: in it all requests join the batch, and their
prompts' last data goes to the tree.

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
MOST_KEPT = 3
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
        self.has_state = "mamba" in served.components
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

    def extend(self) -> None:
        """Add the tokens that the last pass kept to the keys."""
        for request, n in zip(self.requests, self.kept.tolist()):
            request.key.extend(range(n))

    def verified(self) -> None:
        """One pass with drafts, all together; so many of the last one's count as it kept."""
        step = self.cache.step(self.requests, n_drafts=self.n_drafts, n_computed=self.kept)
        assert step.n_tokens is not None
        self.kept = np.minimum(step.n_tokens.numpy(), MOST_KEPT)

    def several(self) -> None:
        """One pass of so many tokens as one with drafts keeps, all together."""
        assert not self.cache.step(self.requests, n_tokens=int(self.kept[0])).refused

    def extend_several(self) -> None:
        """Add that pass's tokens to the keys; it ends where a state is kept."""
        length = len(self.requests[0].key)
        self.kept[:] = min(MOST_KEPT, PERIOD - length % PERIOD) if self.has_state else MOST_KEPT
        self.extend()


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


class Way(NamedTuple):
    """A way of decoding.

    Attributes:
        engine: the requests.
        run: one pass.
        before: what comes before a pass, and is not timed.
        n_steps: passes of a period.
        n_tokens: tokens of each request in it.
    """

    engine: Engine
    run: Callable[[], None]
    before: Callable[[], None] = lambda: None
    n_steps: int = PERIOD
    n_tokens: int = PERIOD

    def period(self) -> list[int]:
        """The ns of each step of one period."""
        found = []
        for _ in range(self.n_steps):
            self.before()
            found.append(spent(self.run))
        return found


def measure(
    served: Served, n_requests: int, n_tokens: int, periods: int
) -> dict[str, tuple[float, float, float, float, float]]:
    """µs of the first pass; mean, least and most of the others; by token; by name of the way."""
    n_steps = PERIOD * (periods + 1)
    looped = Engine(served, n_requests, n_tokens, n_steps)
    stepped = Engine(served, n_requests, n_tokens, n_steps)
    drafted = Engine(served, n_requests, n_tokens, n_steps, DRAFTS)
    kept = Engine(served, n_requests, n_tokens, MOST_KEPT * n_steps, DRAFTS)
    several = Engine(served, n_requests, n_tokens, MOST_KEPT * n_steps)
    gc.collect()
    # A pass ends where a state is kept, every 64 tokens: it keeps one token there.
    n_kept_steps = MOST_KEPT * -(-PERIOD // MOST_KEPT) if kept.has_state else PERIOD
    n_kept_tokens = MOST_KEPT * PERIOD
    ways = {
        "loop": Way(looped, looped.loop),
        "step": Way(stepped, stepped.step),
        "with drafts": Way(drafted, drafted.drafted),
        "of 3 tokens": Way(
            several, several.several, several.extend_several, n_kept_steps, n_kept_tokens
        ),
        "with drafts, 3 kept": Way(kept, kept.verified, kept.extend, n_kept_steps, n_kept_tokens),
    }
    first = {name: way.period()[0] / n_requests / 1e3 for name, way in ways.items()}
    found: dict[str, list[list[int]]] = {name: [] for name in ways}
    for _ in range(periods):
        for name, way in ways.items():
            found[name].append(way.period())
    costs = {}
    for name, way in ways.items():
        least = [min(step) / n_requests / 1e3 for step in zip(*found[name])]
        mean = statistics.fmean(least)
        by_token = sum(least) / way.n_tokens
        costs[name] = (first[name], mean, min(least), max(least), by_token)
        if way.engine is not looped:
            way.engine.cache.check_integrity()
        way.engine.cache.close()
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
        measured = measure(served, n_requests, n_tokens, periods)
        for name, costs in measured.items():
            bars = (2 * served.bar, served.bar) if name == "step" else (None, None)
            told = ["" if bar is None else f"{bar:g}" for bar in reversed(bars)]
            more = f"{join:.1f}" if name == "step" else ""
            beside = "of 3 tokens" if "3" in name else "step"
            relative = f"{costs[1] / measured[beside][1]:.2f}"
            shown = [f"{cost:.2f}" for cost in costs]
            rows.append([f"{served.name}: {name}", *shown, relative, more, *told])
            setting = f"{served.name}: {name}"
            figures(
                [
                    Figure("A decode step of a request", setting, costs[1], bars=bars),
                    Figure("A request's first decode step", setting, costs[0]),
                ]
            )
    head = ("first", "mean", "least", "most", "a token", "relative", "joins")
    grid(["", *head, "bar, compiled", "bar, plain"], rows)


if __name__ == "__main__":
    main()
