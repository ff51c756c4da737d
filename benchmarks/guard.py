"""The guard's cost: workload W with it off, sampled and on.

The requests are those of `workload_w.py`. Each pass serves them with every mode in turn, one after
the other, and ratios to "off" are taken within the pass: moments differ, passes differ less. "off"
is served twice; the ratio of the two says how much of the others is noise. Off, a cache has nothing
of the guard in it (`tests/guard/test_switching.py`), so that ratio is all there is to measure.

The medians say what a request costs. The means have the recomputations of all books in them, which
hit one request in thousands.
"""

from __future__ import annotations

import gc
import statistics
from time import thread_time_ns
from typing import Any, NamedTuple

from _measure import arguments, grid, heading
from workload_w import CONVERSATIONS, PAGE, POOL_TOKENS, TURNS, system_prompt, turns

from kvgraft import Cache, CacheConfig, TokenKey
from kvgraft.config import GuardMode

MODES = ("off", "off again", "sampled", "on")
BAR = 2.0


class Served(NamedTuple):
    """One component set.

    Attributes:
        name: for the table.
        components: their options.
        paged: those with a page table.
        host_tokens: size of the host mirrors; 0 for none.
    """

    name: str
    components: dict[str, dict[str, Any]]
    paged: tuple[str, ...]
    host_tokens: int = 0


SETS = (
    Served("full", {"full": {}}, ("full",)),
    Served("full + mamba", {"full": {}, "mamba": {"states": 4096}}, ("full",)),
    Served(
        "full + swa 4096 + mamba",
        {"full": {}, "swa": {"window": 4096}, "mamba": {"states": 4096}},
        ("full", "swa"),
    ),
    Served(
        "full + swa 4096, with HOST",
        {"full": {}, "swa": {"window": 4096}},
        ("full", "swa"),
        host_tokens=4 * POOL_TOKENS,
    ),
)


def serve(served: Served, mode: str, conversations: int) -> list[float]:
    """The ns of every request."""
    config = CacheConfig(
        components=served.components,
        page_size=PAGE,
        device_tokens=POOL_TOKENS,
        host_tokens=served.host_tokens,
        load=None,
        guard=GuardMode(mode.removesuffix(" again")),
    )
    cache, system = Cache(config), system_prompt()
    keys: dict[int, TokenKey] = {}
    costs: list[float] = []
    gc.collect()
    for turn in turns(conversations):
        start = thread_time_ns()
        key = TokenKey(system) if turn.first else keys[turn.conversation]
        key.extend(turn.new)
        cache.poll()
        request = cache.begin(key)
        while not cache.admit(request).admitted:
            cache.drain()  # copies in flight pin their source
        cache.load_back(request)
        if request.waits:
            cache.drain()
        for component in served.paged:
            cache.table(request, component)
        while request.computed < request.prompt:
            n_tokens = cache.next_chunk(request)
            cache.allocate(request, n_tokens)
            cache.computed(request, n_tokens)
        cache.finish(request)
        costs.append(thread_time_ns() - start)
        keys[turn.conversation] = key
    cache.drain()
    cache.close()
    return costs


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--passes", type=int, help="passes per component set (default 3, quick 1)")
    given = parser.parse_args()
    passes = given.passes or (1 if given.quick else 3)
    conversations = 60 if given.quick else CONVERSATIONS
    heading(
        "the guard on workload W",
        page=f"{PAGE} tokens",
        pool=f"{POOL_TOKENS:,} tokens",
        requests=f"{conversations} conversations x {TURNS} turns",
        repetitions=f"ratios within a pass, median of {passes} passes",
        sampled="one operation of each kind in 100 (the default)",
    )
    medians: list[list[str]] = []
    means: list[list[str]] = []
    for served in SETS:
        found: dict[str, list[list[float]]] = {mode: [] for mode in MODES}
        for _ in range(passes):
            for mode in MODES:
                found[mode].append(serve(served, mode, conversations))
        for rows, average in ((medians, statistics.median), (means, statistics.fmean)):
            costs = {mode: [average(costs) for costs in found[mode]] for mode in MODES}
            ratios = {
                mode: statistics.median(a / b for a, b in zip(costs[mode], costs["off"]))
                for mode in MODES
            }
            rows.append(
                [
                    served.name,
                    f"{statistics.median(costs['off']) / 1e3:.1f}",
                    *(f"{ratios[mode]:.3f}" for mode in MODES[1:]),
                    "ok" if ratios["on"] < BAR else "over",
                ]
            )
    head = ["off, µs", *(f"{mode} / off" for mode in MODES[1:]), f"on < {BAR:g}"]
    grid(["median request", *head], medians)
    grid(["mean request", *head], means)


if __name__ == "__main__":
    main()
