"""From a trace and sizes to the result of a plan."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kvgraft
from kvgraft.config import parse_config
from kvgraft.types import Tier
from kvgraft_replay.planning.lru_curve import LruCurve, lru_curve
from kvgraft_replay.planning.schema import Curve, Growth, PlanResult, SizeResult
from kvgraft_replay.planning.sizes import Pool, Size, built, grown, lru_pages, slot_nbytes
from kvgraft_replay.planning.worker import Done
from kvgraft_replay.planning.workers import replay_all
from kvgraft_replay.replay import ReplaySettings
from kvgraft_replay.workload import Workload

__all__ = ["plan_sizes"]

CURVE_POINTS = 200


def plan_sizes(
    workload: Workload,
    settings: ReplaySettings,
    sizes: Sequence[Size],
    *,
    growth: bool,
    n_processes: int,
    progress: Callable[[float, int], None],
) -> PlanResult:
    """Replay a workload at every size, and compare them.

    Args:
        workload: the requests.
        settings: of each replay; the cache's are taken from the sizes.
        sizes: at least one.
        growth: also replay with each pool a tenth larger, one at a time.
        n_processes: replays that run at a time.
        progress: told how many replays are done, with fractions, and how many there are.

    Raises:
        ConfigError: a replay that cannot be run.
    """
    started, cpu = time.perf_counter(), _cpu_s()
    tried = [(size, *_larger(size)) if growth else (size,) for size in sizes]
    shares = [0.0] * sum(map(len, tried))

    def tell(task: int, share: float) -> None:
        shares[task] = share
        progress(sum(shares), len(shares))

    found = iter(
        replay_all(
            workload,
            settings,
            [size.cache for group in tried for size in group],
            n_processes=n_processes,
            progress=tell,
        )
    )
    curve, reason = _curve(workload, settings, sizes[0])
    outcomes = [[next(found) for _ in group] for group in tried]
    results = [
        _result(group, done, settings, curve) for group, done in zip(tried, outcomes, strict=True)
    ]
    first = outcomes[0][0].result
    return {
        "kvgraft": kvgraft.__version__,
        "workload": first["workload"],
        "components": first["settings"]["components"],
        "settings": _settings(first["settings"], sizes[0]),
        "notices": list(dict.fromkeys(n for group in outcomes for n in group[0].result["notices"])),
        "sizes": results,
        "curve": _points(curve, reason, sizes),
        "cpu_s": _cpu_s() - cpu,
        "wall_s": time.perf_counter() - started,
    }


def _cpu_s() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    used = [resource.getrusage(each) for each in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _larger(size: Size) -> list[Size]:
    """The size with each pool a tenth larger, one at a time."""
    return [larger for pool in size.pools if (larger := grown(size, pool)) is not None]


def _curve(workload: Workload, settings: ReplaySettings, size: Size) -> tuple[LruCurve | None, str]:
    """The exact curve, or why there is none."""
    if settings.users is not None:
        return None, "in a closed loop the order of requests depends on the size"
    mounted = built(parse_config(size.cache))
    if lru_pages(mounted) is None:
        names = ", ".join(each.name for each in mounted if lru_pages([each]) is None)
        return None, f"{names} needs something else than every page before a boundary, on DEVICE"
    requests = workload.requests[: settings.limit]
    return lru_curve(requests, size.cache["page_size"]), ""


def _points(curve: LruCurve | None, reason: str, sizes: Sequence[Size]) -> Curve:
    if curve is None:
        return {"reason": reason, "needed_tokens": 0, "points": []}
    page_size = curve.page_size
    mounted = built(parse_config(sizes[0].cache))
    per_page = sum(slot_nbytes(mounted)[each.name] * each.shape.slots_per_page for each in mounted)
    largest = max(size.cache["device_tokens"] for size in sizes) // page_size
    end = min(max(largest * 5 // 4, 1), max(curve.needed_pages, largest))
    places = sorted({end * step // CURVE_POINTS for step in range(CURVE_POINTS + 1)})
    return {
        "reason": "",
        "needed_tokens": curve.needed_pages * page_size,
        "points": [
            {
                "tokens": n_pages * page_size,
                "nbytes": n_pages * per_page,
                "token_hit_rate": curve.hit_rate(n_pages),
            }
            for n_pages in places
        ],
    }


def _result(
    tried: Sequence[Size], done: Sequence[Done], settings: ReplaySettings, curve: LruCurve | None
) -> SizeResult:
    size, result = tried[0], done[0].result
    pages = None if curve is None else size.cache["device_tokens"] // curve.page_size
    loaded: Mapping[str, int] = result["load_backs"]["slots"]
    nbytes = slot_nbytes(built(parse_config(size.cache)))
    return {
        "device": _asked(size.device),
        "host": _asked(size.host),
        "device_tokens": size.cache["device_tokens"],
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
        "lru_hit_rate": None if curve is None or pages is None else curve.hit_rate(pages),
        "pools": [
            {
                "component": pool.component,
                "tier": pool.tier.value,
                "slots": pool.slots,
                "nbytes": pool.nbytes,
                "evicted": sum(result["evictions"][pool.component][pool.tier.value].values()),
            }
            for pool in size.pools
        ],
        "growth": [
            _growth(size, larger, result, after.result)
            for larger, after in zip(tried[1:], done[1:], strict=True)
        ],
        "first_problem": result["first_problem"],
    }


def _growth(
    size: Size, larger: Size, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Growth:
    (pool,) = _changed(size, larger)
    extra = larger.nbytes(pool.tier) - size.nbytes(pool.tier)
    return {
        "component": pool.component,
        "tier": pool.tier.value,
        "extra_nbytes": extra,
        "gained_tokens": after["saved_tokens"] - before["saved_tokens"],
        "token_hit_rate": after["token_hit_rate"],
    }


def _changed(size: Size, larger: Size) -> list[Pool]:
    return [new for old, new in zip(size.pools, larger.pools, strict=True) if old != new]


def _asked(size: int | str) -> str:
    return size if isinstance(size, str) else f"{size:,} tokens" if size else "none"


def _settings(first: Mapping[str, Any], size: Size) -> dict[str, object]:
    """Settings that are the same at every size."""
    own = ("components", "device_tokens", "host_tokens", "slots", "device", "payload", "storage")
    load = size.cache.get("load")
    return {
        **{name: value for name, value in first.items() if name not in own},
        "load_policy": "always" if load is None else "cost",
    }
