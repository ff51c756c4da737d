"""Makes the result of a plan from a trace and sizes."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import kvgraft
from kvgraft.config import parse_config
from kvgraft.sizes import is_nbytes, parse_tokens
from kvgraft.types import Tier
from kvgraft_replay.planning.lru_curve import LruCurve, lru_curve
from kvgraft_replay.planning.schema import (
    NOTICEABLE,
    Curve,
    Growth,
    PlanResult,
    PoolName,
    SizeResult,
    Split,
    Target,
)
from kvgraft_replay.planning.sizes import (
    Size,
    between,
    built,
    default_shapes,
    grown,
    lru_pages,
    page_nbytes,
    reaches,
    slot_nbytes,
    with_points,
)
from kvgraft_replay.planning.workers import Replays
from kvgraft_replay.replay import ReplaySettings
from kvgraft_replay.report.plot import compact
from kvgraft_replay.workload import Workload

__all__ = ["Sweep", "plan_sizes"]

CURVE_POINTS = 200

OF_A_SIZE = {
    *("components", "device", "device_memory", "device_tokens", "eviction_policy"),
    *("host_memory", "host_tokens", "payload"),
    *("slots", "storage"),
}
"""Settings of a replay that belong to the size, or have no meaning here."""

SEARCH_ROUNDS = 4
"""Rounds of the search for a target between two sizes of DEVICE; each halves the distance."""

POINTS = (0.5, 0.9, 1.1, 2.0)
"""Splits that are tried beside the rule's, as multiples of its resume points."""

FURTHER_ROUNDS = 2
"""How often to halve or double further if the fewest or the most points are best."""

Replayed = Mapping[str, Any]
"""A replay's result, without the parts that grow with the workload."""


class Sweep:
    """The replays of one plan.

    Args:
        workload: the requests.
        settings: settings of each replay; the cache's come from the sizes.
        n_processes: concurrent replays.
        progress: called with the number of finished replays, with fractions, and of all known ones.
    """

    def __init__(
        self,
        workload: Workload,
        settings: ReplaySettings,
        *,
        n_processes: int,
        progress: Callable[[float, int], None],
    ) -> None:
        self.workload = workload
        self.settings = settings
        self._replays = Replays(workload, settings, n_processes)
        self._progress = progress
        self._done: dict[str, Replayed] = {}

    def replay(self, sizes: Sequence[Size]) -> list[Replayed]:
        """Replay at each size, several at a time; results in order. No size is replayed twice.

        Raises:
            ConfigError: a replay that cannot be run.
        """
        wanted = [repr(size.cache) for size in sizes]
        caches = {name: size.cache for name, size in zip(wanted, sizes) if name not in self._done}
        shares, n_done = [0.0] * len(caches), len(self._done)

        def tell(task: int, share: float) -> None:
            shares[task] = share
            self._progress(n_done + sum(shares), n_done + len(shares))

        if caches:
            self._done.update(zip(caches, self._replays.run(list(caches.values()), tell)))
        return [self._done[name] for name in wanted]

    def close(self) -> None:
        """End the processes of the replays."""
        self._replays.close()


def plan_sizes(
    sweep: Sweep, sizes: Sequence[Size], *, growth: bool, target: float | None
) -> PlanResult:
    """Replay at every size, and compare them.

    Args:
        sweep: the replays.
        sizes: at least one.
        growth: also replay with other splits of bytes, and with each pool a tenth larger, one at a
            time.
        target: a hit rate between 0 and 1: find the smallest sizes of DEVICE that reach it.

    Raises:
        ConfigError: a replay that cannot be run.

    Effects: the sweep is closed, even if it raises.
    """
    try:
        return _plan(sweep, sizes, growth=growth, target=target)
    finally:
        sweep.close()


def _plan(sweep: Sweep, sizes: Sequence[Size], *, growth: bool, target: float | None) -> PlanResult:
    started, cpu = time.perf_counter(), _cpu_s()
    if growth:
        tries = _splits(sweep, sizes)
    else:
        tries = [[_Try(*each)] for each in zip(sizes, sweep.replay(sizes))]
    best = [max(some, key=_worth) for some in tries]
    sizes = [each.size for each in best]
    larger = [_larger(size) if growth else [] for size in sizes]
    after = iter(sweep.replay([each for some in larger for each in some]))
    curve, reason = _curve(sweep, sizes[0])
    results = [_result(each.size, each.result, sweep.settings, curve) for each in best]
    for size, some, result, tried_splits in zip(sizes, larger, results, tries):
        result["growth"] = [_growth(size, result, each, next(after)) for each in some]
        result["limiting"] = _limiting(result)
        result["split"] = _split(tried_splits, result, size)
    if target is not None:
        tried, more = _searched(sweep, sizes, results, target, curve)
        results = [*results, *more]
        sizes = [*sizes, *tried]
    first = best[0].result
    sweep.close()  # before the CPU time is read, which counts ended processes only
    return {
        "kvgraft": kvgraft.__version__,
        "workload": first["workload"],
        "model": None,
        "reaches": reaches(sizes[0]),
        "components": {
            name: dict(options)
            for name, options in parse_config(
                {**sizes[0].cache, "components": sizes[0].given["components"]}
            ).components.items()
        },
        "settings": _settings(first["settings"], sizes[0]),
        "notices": list(
            dict.fromkeys(
                [
                    *_shape_notices(sizes),
                    *(each for one in best for each in one.result["notices"]),
                ]
            )
        ),
        "sizes": results,
        "curve": _points(curve, reason, sizes),
        "target": None if target is None else _target(target, results, curve),
        "cpu_s": _cpu_s() - cpu,
        "wall_s": time.perf_counter() - started,
    }


def _shape_notices(sizes: Sequence[Size]) -> list[str]:
    """A notice if sizes in bytes are used without the model's own shapes."""
    if not any(is_nbytes(asked) for size in sizes for asked in (size.device, size.host)):
        return []
    return [
        f"{name} has its default shapes, {nbytes}, so bytes are not those of a model; give --model "
        f"CONFIG.json, or the model's shapes as --component {name}:OPTION=VALUE"
        for name, nbytes in default_shapes(sizes[0]).items()
    ]


def _cpu_s() -> float:
    """CPU time of this process and of its ended child processes."""
    used = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _settings(first: Mapping[str, Any], size: Size) -> dict[str, object]:
    """Settings that are the same at every size."""
    load = size.cache.get("load")
    return {
        **{name: value for name, value in first.items() if name not in OF_A_SIZE},
        "load_policy": "always" if load is None else "cost",
        "one_budget": "device_memory" in size.cache,
    }


def _result(
    size: Size, result: Replayed, settings: ReplaySettings, curve: LruCurve | None
) -> SizeResult:
    loaded: Mapping[str, int] = result["load_backs"]["slots"]
    nbytes = slot_nbytes(built(parse_config(size.cache)))
    tokens, slots = size.cache["device_tokens"], result["settings"]["slots"]
    return {
        "device": _asked(size.device),
        "host": _asked(size.host),
        "policy": size.policy,
        "device_tokens": tokens,
        "host_tokens": size.cache["host_tokens"],
        "device_nbytes": size.nbytes(Tier.DEVICE),
        "host_nbytes": size.nbytes(Tier.HOST),
        "requests": result["requests"],
        "served": result["served"],
        "input_tokens": result["input_tokens"],
        "token_hit_rate": result["token_hit_rate"],
        "hit_tokens": result["hit_tokens"],
        "saved_tokens": result["saved_tokens"],
        "prefill_s_saved": result["saved_tokens"] / settings.model.prefill_tokens_s,
        "load_back_nbytes": sum(nbytes[name] * n for name, n in loaded.items()),
        "deferrals": result["deferrals"],
        "retractions": result["retractions"],
        "rejections": result["rejections"],
        "lru_hit_rate": None if curve is None else curve.hit_rate(tokens // curve.page_size),
        "pools": [
            {
                "component": pool.component,
                "tier": pool.tier.value,
                "slots": slots[pool.component][pool.tier.value],
                "tokens": slots[pool.component][pool.tier.value] * pool.slot_tokens,
                "nbytes": slots[pool.component][pool.tier.value] * pool.nbytes // pool.slots,
                "evicted": sum(result["evictions"][pool.component][pool.tier.value].values()),
            }
            for pool in size.pools
        ],
        "split": None,
        "growth": [],
        "limiting": None,
        "out_of_memory": result["out_of_memory"],
        "ledger_violations": result["ledger_violations"],
        "first_problem": result["first_problem"],
    }


def _asked(size: int | str) -> str:
    """A size as an option's value: `"40GB"`, `"4M"` for tokens, `"none"` for no tier."""
    if isinstance(size, str):
        return size
    short = compact(size) if size < 1e9 else f"{size / 1e6:.12g}M"
    return "none" if not size else short if parse_tokens(short) == size else f"{size}"


# -- splits of the same bytes


class _Try(NamedTuple):
    """A size and its replay."""

    size: Size
    result: Replayed


def _worth(tried: _Try) -> tuple[int, int, bool]:
    """Sort key of splits: fewest rejected requests, most saved tokens, the rule's among equals."""
    size, result = tried
    return -result["rejections"], result["saved_tokens"], size.points == 1


def _splits(sweep: Sweep, sizes: Sequence[Size]) -> list[list[_Try]]:
    """Replays of each size, with the rule's split first and with others around it.

    A size without other splits is final: its larger pools are replayed along with it, so that no
    CPU waits for the last size.
    """
    batch = [
        [size, *(each for points in POINTS if (each := with_points(size, points)))]
        for size in sizes
    ]
    alone = [some[0] for some in batch if len(some) == 1]
    sweep.replay(
        [each for some in batch for each in some]
        + [each for size in alone for each in _larger(size)]
    )
    tries: list[list[_Try]] = [[] for _ in sizes]
    for _ in range(1 + FURTHER_ROUNDS):
        done = iter(sweep.replay([each for some in batch for each in some]))
        for some, found in zip(batch, tries):
            found += [_Try(size, next(done)) for size in some]
        batch = [_further(found) for found in tries]
    return tries


def _further(tries: Sequence[_Try]) -> list[Size]:
    """Fewer points than the fewest, or more than the most, if these are the best so far."""
    best = max(tries, key=_worth).size
    points = sorted(each.size.points for each in tries)
    if len(points) == 1 or best.points not in (points[0], points[-1]):
        return []
    further = with_points(best, best.points * (0.5 if best.points == points[0] else 2))
    return [] if further is None else [further]


def _split(tries: Sequence[_Try], best: SizeResult, size: Size) -> Split | None:
    if len(tries) == 1:
        return None
    rule = next(each.result for each in tries if each.size.points == 1)
    return {
        "points": size.points,
        "gained_tokens": best["saved_tokens"] - rule["saved_tokens"],
        "tried": [
            {
                "points": each.size.points,
                "token_hit_rate": each.result["token_hit_rate"],
                "saved_tokens": each.result["saved_tokens"],
                "rejections": each.result["rejections"],
            }
            for each in sorted(tries, key=lambda each: each.size.points)
        ],
    }


# -- a tenth more


def _larger(size: Size) -> list[Size]:
    """The size with each pool a tenth larger, one at a time."""
    return [larger for pool in size.pools if (larger := grown(size, pool)) is not None]


def _growth(size: Size, before: SizeResult, larger: Size, after: Replayed) -> Growth:
    (pool,) = (new for old, new in zip(size.pools, larger.pools) if old != new)
    return {
        "component": pool.component,
        "tier": pool.tier.value,
        "extra_nbytes": larger.nbytes(pool.tier) - size.nbytes(pool.tier),
        "gained_tokens": after["saved_tokens"] - before["saved_tokens"],
        "token_hit_rate": after["token_hit_rate"],
    }


def _limiting(result: SizeResult) -> PoolName | None:
    best = max(result["growth"], key=lambda each: each["gained_tokens"], default=None)
    if best is None or best["gained_tokens"] < NOTICEABLE * result["input_tokens"]:
        return None
    return {"component": best["component"], "tier": best["tier"]}


# -- a target


def _searched(
    sweep: Sweep,
    sizes: Sequence[Size],
    results: Sequence[SizeResult],
    target: float,
    curve: LruCurve | None,
) -> tuple[list[Size], list[SizeResult]]:
    """Search sizes between the largest that misses the target and the smallest that reaches it.

    This is done for each size of HOST and each policy; there are none if all reach it, or none
    does.
    """
    brackets: list[tuple[Size, Size]] = []
    for kind in dict.fromkeys((size.host, size.policy) for size in sizes):
        same = [each for each in zip(sizes, results) if (each[0].host, each[0].policy) == kind]
        same.sort(key=lambda each: each[0].nbytes(Tier.DEVICE))
        rates = [one["token_hit_rate"] for _, one in same]
        first = next((place for place, rate in enumerate(rates) if rate >= target), 0)
        if first:
            brackets.append((same[first - 1][0], same[first][0]))
    tried: list[Size] = []
    found: list[SizeResult] = []
    for _ in range(SEARCH_ROUNDS):
        middles = [between(*bracket) for bracket in brackets]
        brackets = [each for each, middle in zip(brackets, middles) if middle is not None]
        sizes = [middle for middle in middles if middle is not None]
        if not sizes:
            break
        for place, (size, result) in enumerate(zip(sizes, sweep.replay(sizes))):
            low, high = brackets[place]
            reached = result["token_hit_rate"] >= target
            brackets[place] = (low, size) if reached else (size, high)
            tried.append(size)
            found.append(_result(size, result, sweep.settings, curve))
    return tried, found


def _target(target: float, results: Sequence[SizeResult], curve: LruCurve | None) -> Target:
    reached = [place for place, one in enumerate(results) if one["token_hit_rate"] >= target]

    def needs(place: int) -> tuple[int, int]:
        return results[place]["device_nbytes"], results[place]["host_nbytes"]

    cheapest = [
        place
        for place in reached
        if not any(
            needs(other) != needs(place) and all(a <= b for a, b in zip(needs(other), needs(place)))
            for other in reached
        )
    ]
    n_pages = None if curve is None else curve.pages_for(target)
    return {
        "token_hit_rate": target,
        "cheapest": sorted(cheapest, key=needs),
        "lru_device_tokens": n_pages
        if n_pages is None or curve is None
        else n_pages * curve.page_size,
    }


# -- the exact curve


def _curve(sweep: Sweep, size: Size) -> tuple[LruCurve | None, str]:
    """The exact curve, or why there is none."""
    if sweep.settings.users is not None:
        return None, "in a closed loop the order of requests depends on the size"
    mounted = built(parse_config(size.cache))
    others = [each.name for each in mounted if lru_pages([each]) is None]
    if others:
        return None, f"{', '.join(others)}: not every page before a boundary is needed on DEVICE"
    requests = sweep.workload.requests[: sweep.settings.limit]
    return lru_curve(requests, size.cache["page_size"]), ""


def _points(curve: LruCurve | None, reason: str, sizes: Sequence[Size]) -> Curve:
    """The curve up to the largest size, or somewhat further if it still rises."""
    if curve is None:
        return {"reason": reason, "needed_tokens": 0, "highest_hit_rate": 0.0, "points": []}
    per_page = page_nbytes(built(parse_config(sizes[0].cache)))
    largest = max(size.cache["device_tokens"] for size in sizes) // curve.page_size
    end = max(largest, min(largest * 5 // 4, curve.needed_pages))
    places = sorted({end * step // CURVE_POINTS for step in range(CURVE_POINTS + 1)})
    return {
        "reason": "",
        "needed_tokens": curve.needed_pages * curve.page_size,
        "highest_hit_rate": curve.hit_rate(curve.n_pages),
        "points": [
            {
                "tokens": n_pages * curve.page_size,
                "nbytes": n_pages * per_page,
                "token_hit_rate": curve.hit_rate(n_pages),
            }
            for n_pages in places
        ],
    }
