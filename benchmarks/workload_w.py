"""Workload W: the CPU cost of whole requests, by component set.

200 conversations of 20 turns, 1,024 new tokens a turn behind one system prompt of 2,048 tokens
that all share; 40 conversations active at a time, the next turn drawn among them; a pool of 1M
tokens, pages of 64. A request extends the conversation's key, begins (match, pin), is admitted,
gathers its slots, makes room and allocates, computes, and finishes (insert, unpin). The pools are
real tensors, small ones; copying states is part of the cost, running a model is not.

New tokens are drawn before the clock starts; they come as a list of Python integers. A conversation
keeps its key. The rows "new keys" show the other way: every request comes as an int32 array of its
whole prompt, a key is built of it and compared from the root. With "events read" a reader takes the
cache's events after every request, and hashes no pages. The rows "lru" have that eviction policy in
place of the default one.

The first passes time whole requests; the last one times each operation, so that its timers are not
part of the others' numbers.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from time import thread_time_ns
from typing import Any, NamedTuple

import numpy as np
from _measure import (
    Figure,
    Row,
    Scale,
    Unit,
    arguments,
    figures,
    grid,
    heading,
    least,
    table,
)

from kvgraft import (
    HOST_MIRROR,
    AttentionOptions,
    BuildContext,
    Cache,
    CacheConfig,
    Component,
    ComponentDeclaration,
    Kind,
    Reach,
    TokenKey,
    Trailing,
    hookimpl,
)
from kvgraft.compiled import is_compiled
from kvgraft.packages.registry import Plugin, load_plugin
from kvgraft.pools import attention_planes, paged_pools

TITLE = "Workload W"
CONVERSATIONS, TURNS, ACTIVE = 200, 20, 40
SYSTEM_TOKENS, NEW_TOKENS, VOCABULARY = 2048, 1024, 100_000
PAGE, POOL_TOKENS = 64, 1_000_000
UNIT_EVERY = 25
OPERATIONS = ("extend", "begin", "admit", "table", "next_chunk", "allocate", "computed", "finish")


NO_BARS = (None, None)


class LocalOptions(AttentionOptions):
    """Options of the third-party component."""

    window: int = 4096


class LocalAttention:
    """A component as a third party would write it: the reach of `swa`, another name."""

    @hookimpl
    def declare_component(self) -> ComponentDeclaration:
        return ComponentDeclaration(
            name="local",
            api_version="1.0",
            kind=Kind.PAGED,
            summary="the last tokens before the boundary",
            options=LocalOptions,
            capabilities=frozenset({HOST_MIRROR}),
        )

    @hookimpl
    def create_component(self, options: LocalOptions, context: BuildContext) -> Component:
        device, host = paged_pools(options, context, attention_planes(options, context.page_size))
        return Component(Reach(Trailing(options.window)), device, host)


class Variant(NamedTuple):
    """A component set and its bars in units, plain and compiled; keys may be new, events be read.

    The eviction policy is the default one or another.
    """

    name: str
    components: dict[str, dict[str, Any]]
    bars: tuple[float | None, float | None]
    paged: tuple[str, ...]
    plugins: tuple[Plugin, ...] = ()
    keeps_keys: bool = True
    reads_events: bool = False
    policy: str = "density"


def variants() -> list[Variant]:
    full: dict[str, Any] = {"full": {}}
    wide: dict[str, Any] = {"window": 4096}
    states: dict[str, Any] = {"states": 4096}
    local = load_plugin("local", LocalAttention())
    return [
        Variant("full", full, (10, 3), ("full",)),
        Variant("full + swa 4096", {**full, "swa": wide}, (18, 4.5), ("full", "swa")),
        Variant(
            "full + local 4096", {**full, "local": wide}, (18, 4.5), ("full", "local"), (local,)
        ),
        Variant("full + swa 128", {**full, "swa": {"window": 128}}, NO_BARS, ("full", "swa")),
        Variant("full + mamba", {**full, "mamba": states}, (11, 4), ("full",)),
        Variant(
            "full + swa 4096 + mamba",
            {**full, "swa": wide, "mamba": states},
            (24, 5.5),
            ("full", "swa"),
        ),
        Variant("full, events read", full, NO_BARS, ("full",), reads_events=True),
        Variant(
            "full + swa 128, events read",
            {**full, "swa": {"window": 128}},
            NO_BARS,
            ("full", "swa"),
            reads_events=True,
        ),
        Variant("full, new keys", full, NO_BARS, ("full",), keeps_keys=False),
        Variant(
            "full + swa 4096 + mamba, new keys",
            {**full, "swa": wide, "mamba": states},
            NO_BARS,
            ("full", "swa"),
            keeps_keys=False,
        ),
        Variant("full, lru", full, NO_BARS, ("full",), policy="lru"),
        Variant(
            "full + swa 128, lru",
            {**full, "swa": {"window": 128}},
            NO_BARS,
            ("full", "swa"),
            policy="lru",
        ),
        Variant("full + mamba, lru", {**full, "mamba": states}, NO_BARS, ("full",), policy="lru"),
    ]


class Turn(NamedTuple):
    """One request to come: its conversation, whether it is the first, its new tokens."""

    conversation: int
    first: bool
    new: list[int]


def turns(conversations: int) -> Iterator[Turn]:
    """The same requests each time."""
    order = random.Random(0)
    rng = np.random.default_rng(0)
    waiting = list(range(conversations))[::-1]
    active: list[int] = []
    done = [0] * conversations
    while waiting or active:
        while waiting and len(active) < ACTIVE:
            active.append(waiting.pop())
        chosen = order.choice(active)
        yield Turn(chosen, not done[chosen], rng.integers(0, VOCABULARY, NEW_TOKENS).tolist())
        done[chosen] += 1
        if done[chosen] == TURNS:
            active.remove(chosen)


class Pass(NamedTuple):
    """Measurements of one pass over the workload; ns of CPU."""

    costs: list[float]
    scale: Scale
    hit_rate: float


def system_prompt() -> list[int]:
    return [int(t) for t in np.random.default_rng(1).integers(0, VOCABULARY, SYSTEM_TOKENS)]


def open_cache(variant: Variant) -> Cache:
    config = CacheConfig(
        components=variant.components,
        page_size=PAGE,
        device_tokens=POOL_TOKENS,
        load=None,
        policy=variant.policy,
    )
    return Cache(config, plugins=variant.plugins)


def whole_requests(variant: Variant, conversations: int) -> Pass:
    """Time each request as one."""
    cache, system, unit = open_cache(variant), system_prompt(), Unit()
    keys: dict[int, TokenKey] = {}
    costs: list[float] = []
    hit = total = 0
    paged = variant.paged
    stream = cache.events() if variant.reads_events else None
    for turn in turns(conversations):
        if len(costs) % UNIT_EVERY == 0:
            unit.sample()
        if not variant.keeps_keys:
            before = system if turn.first else keys[turn.conversation].tokens()
            prompt = np.concatenate([before, turn.new], dtype=np.int32)
        start = thread_time_ns()
        if variant.keeps_keys:
            key = TokenKey(system) if turn.first else keys[turn.conversation]
            key.extend(turn.new)
        else:
            key = TokenKey(prompt)
        request = cache.begin(key)
        admitted = cache.admit(request).admitted
        for component in paged:
            cache.table(request, component)
        while admitted and request.computed < request.prompt:
            n_tokens = cache.next_chunk(request)
            cache.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
        anchor = request.anchor_tokens
        cache.finish(request)
        if stream is not None:
            stream.take()
        costs.append(thread_time_ns() - start)
        assert admitted
        keys[turn.conversation] = key
        hit += anchor
        total += key.n_tokens
    cache.check_integrity()
    cache.close()
    return Pass(costs, unit.take(), hit / total)


class Laps:
    """Time since the last lap, booked under the operation that ended."""

    def __init__(self) -> None:
        self.costs: dict[str, list[int]] = {name: [] for name in OPERATIONS}
        self.start()

    def start(self) -> None:
        """A request begins."""
        self.spent = dict.fromkeys(OPERATIONS, 0)
        self.at = thread_time_ns()

    def lap(self, operation: str) -> None:
        """An operation ended."""
        now = thread_time_ns()
        self.spent[operation] += now - self.at
        self.at = thread_time_ns()

    def stop(self) -> None:
        """A request ended."""
        for name, cost in self.spent.items():
            self.costs[name].append(cost)


def by_operation(variant: Variant, conversations: int) -> dict[str, float]:
    """Time each operation; the median over requests of an operation's ns in one request."""
    cache, system, laps = open_cache(variant), system_prompt(), Laps()
    keys: dict[int, TokenKey] = {}
    for turn in turns(conversations):
        laps.start()
        key = TokenKey(system) if turn.first else keys[turn.conversation]
        key.extend(turn.new)
        laps.lap("extend")
        request = cache.begin(key)
        laps.lap("begin")
        cache.admit(request)
        laps.lap("admit")
        for component in variant.paged:
            cache.table(request, component)
        laps.lap("table")
        while request.computed < request.prompt:
            n_tokens = cache.next_chunk(request)
            laps.lap("next_chunk")
            cache.allocate(request, n_tokens)
            laps.lap("allocate")
            cache.computed(request, n_tokens)
            laps.lap("computed")
        cache.finish(request)
        laps.lap("finish")
        laps.stop()
        keys[turn.conversation] = key
    cache.close()
    return {name: statistics.median(values) for name, values in laps.costs.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--passes", type=int, help="passes per component set (default 3, quick 1)")
    parser.add_argument("--only", help="component sets whose name contains this")
    given = parser.parse_args()
    passes = given.passes or (1 if given.quick else 3)
    conversations = 80 if given.quick else CONVERSATIONS
    chosen = [v for v in variants() if given.only is None or given.only in v.name]
    heading(
        "workload W",
        page=f"{PAGE} tokens",
        pool=f"{POOL_TOKENS:,} tokens",
        requests=f"{conversations} conversations x {TURNS} turns",
        repetitions=f"median over requests, least of {passes} passes",
    )
    runs: dict[str, list[Pass]] = {variant.name: [] for variant in chosen}
    for _ in range(passes):
        for variant in chosen:
            runs[variant.name].append(whole_requests(variant, conversations))
    scale = least(done.scale for passed in runs.values() for done in passed)
    print("unit", scale)
    medians = {v.name: min(statistics.median(p.costs) for p in runs[v.name]) for v in chosen}
    built = is_compiled()
    table((Row(v.name, medians[v.name], scale, v.bars[built]) for v in chosen), "median request")
    figures(
        Figure(
            TITLE,
            v.name,
            medians[v.name] / 1e3,
            units=medians[v.name] / scale.unlike,
            bars=v.bars,
        )
        for v in chosen
    )
    table(
        (Row(v.name, min(statistics.fmean(p.costs) for p in runs[v.name]), scale) for v in chosen),
        "mean request",
    )
    for variant in chosen:
        print(f"hit rate {runs[variant.name][0].hit_rate:.4f}: {variant.name}")
    print()
    if {"full + local 4096", "full + swa 4096"} <= set(runs):
        pairs = zip(runs["full + local 4096"], runs["full + swa 4096"])
        ratios = [statistics.median(a.costs) / statistics.median(b.costs) for a, b in pairs]
        print(
            "third-party component / built-in of the same reach, per pass: "
            + ", ".join(f"{ratio:.3f}" for ratio in ratios)
        )
        print()
    told = [v for v in chosen if v.keeps_keys and not v.reads_events]
    spent = {v.name: by_operation(v, conversations) for v in told}
    grid(
        ["µs by operation, median", *OPERATIONS, "sum"],
        [
            [
                name,
                *(f"{cost / 1e3:.1f}" for cost in costs.values()),
                f"{sum(costs.values()) / 1e3:.1f}",
            ]
            for name, costs in spent.items()
        ],
    )


if __name__ == "__main__":
    main()
