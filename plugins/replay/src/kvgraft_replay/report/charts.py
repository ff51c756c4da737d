"""The page's charts over time and over requests, built from a replay result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from kvgraft_replay.report.plot import (
    Layer,
    Plot,
    Row,
    Tick,
    bar_layers,
    line_path,
    place,
    stacked_layers,
    ticks,
    time_unit,
)
from kvgraft_replay.report.summary import has_storage, has_unserved

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvgraft_replay.report.schema import ReplayResult, Source, TierOccupancy, TimelinePoint

__all__ = [
    "LEDGER_TONES",
    "PoolPlot",
    "hit_rate_plot",
    "load_plot",
    "pool_plots",
    "source_plot",
    "source_tones",
]

MAX_BARS = 96
SourceName = Literal["device", "host", "storage", "computed", "unserved"]

SOURCES: tuple[SourceName, ...] = ("device", "host", "storage", "computed", "unserved")
# Bottom to top: slots that cannot be taken first, free slots last.
LEDGER_TONES = (
    ("pinned", "pinned"),
    ("private", "private"),
    ("in flight", "inflight"),
    ("evictable", "evictable"),
    ("free", "free"),
)


class PoolPlot(NamedTuple):
    """One pool's occupancy; `plot` is None if the component has no such pool."""

    component: str
    tier: str
    capacity: int
    peak_pinned: int
    plot: Plot | None


class _TimeAxis(NamedTuple):
    xs: NDArray[np.float64]
    at: list[float]
    labels: list[str]
    ticks: list[Tick]
    label: str


def _time_axis(points: Sequence[TimelinePoint], end: float | None = None) -> _TimeAxis:
    times = [point["time_s"] for point in points]
    end = max(times, default=0.0) if end is None else end
    per_unit, unit = time_unit(end)
    xs = place(times, end)
    return _TimeAxis(
        xs,
        [round(float(x) / 10, 2) for x in xs],
        [f"{time / per_unit:,.2f} {unit}" for time in times],
        ticks(end / per_unit, 6),
        f"time ({unit})",
    )


def hit_rate_plot(result: ReplayResult) -> Plot | None:
    """Token hit rate per interval, and cumulative."""
    # An interval without requests has no rate.
    points = [point for point in result["timeline"] if point["requests"]]
    if not points or not result["input_tokens"]:
        return None
    axis = _time_axis(points, max(point["time_s"] for point in result["timeline"]))
    within = [point["token_hit_rate"] for point in points]
    overall = [point["cumulative_hit_rate"] for point in points]
    parts, rows = (
        [("interval", place(within, 1))],
        [Row("this interval", "interval", "share", within)],
    )
    if has_storage(result):
        stored = [point["storage_hit_rate"] for point in points]
        resident = [rate - part for rate, part in zip(within, stored, strict=True)]
        parts = [("interval", place(resident, 1)), ("storage", place(stored, 1))]
        rows.append(Row("of it from storage", "storage", "share", stored))
    return Plot(
        "Token hit rate over time",
        axis.label,
        "of input tokens",
        axis.ticks,
        [Tick(at, f"{at:.0f} %", False) for at in (0.0, 25.0, 50.0, 75.0, 100.0)],
        [
            *stacked_layers(axis.xs, parts),
            Layer("overall", line_path(axis.xs, place(overall, 1)), "line"),
        ],
        axis.at,
        axis.labels,
        [
            Row("so far", "overall", "share", overall),
            *rows,
            Row("requests in it", "", "count", [point["requests"] for point in points]),
        ],
    )


def load_plot(result: ReplayResult) -> Plot | None:
    """Requests running and waiting over time."""
    points = result["timeline"]
    if not points:
        return None
    axis = _time_axis(points)
    running = [point["running"] for point in points]
    waiting = [point["waiting"] for point in points]
    limit = max(1, *(a + b for a, b in zip(running, waiting, strict=True)))
    return Plot(
        "Requests running and waiting over time",
        axis.label,
        "requests",
        axis.ticks,
        ticks(limit, 3, least=1.0),
        stacked_layers(
            axis.xs, [("running", place(running, limit)), ("waiting", place(waiting, limit))]
        ),
        axis.at,
        axis.labels,
        [
            Row("waiting", "waiting", "count", waiting),
            Row("running", "running", "count", running),
        ],
    )


def source_tones(result: ReplayResult) -> list[SourceName]:
    """Names and colours of token sources; storage only if there was one."""
    told = {"storage": has_storage(result), "unserved": has_unserved(result)}
    return [name for name in SOURCES if told.get(name, True)]


def source_plot(result: ReplayResult) -> tuple[Plot | None, int]:
    """Input tokens per request by source, and how many requests one bar averages."""
    sources, names = result["sources"], source_tones(result)
    if not sources:
        return None, 1
    per_bar = -(-len(sources) // MAX_BARS)
    buckets = [sources[first : first + per_bar] for first in range(0, len(sources), per_bar)]
    values = {
        name: [sum(one.get(name, 0) for one in some) / len(some) for some in buckets]
        for name in names
    }
    limit = float(max(sum(parts) for parts in zip(*values.values(), strict=True)))
    pitch = 100 / len(buckets)
    # Bars are at their bucket's place, so the axis counts requests, not bars.
    axis_end = len(buckets) * per_bar
    return Plot(
        "Where each request's input tokens came from",
        "request, in order of arrival",
        "tokens per request",
        ticks(axis_end, 6, least=1.0) if len(sources) > 1 else [],
        ticks(limit, 4, least=1.0),
        bar_layers([(name, place(values[name], limit)) for name in names]),
        [round((index + 0.5) * pitch, 2) for index in range(len(buckets))],
        [_bucket_label(some) for some in buckets],
        [Row(name, name, "count", values[name]) for name in reversed(names)],
    ), per_bar


def _bucket_label(some: Sequence[Source]) -> str:
    first, last = some[0], some[-1]
    per_unit, unit = time_unit(first["time_s"])
    when = f"{first['time_s'] / per_unit:,.1f} {unit}"
    if len(some) == 1:
        return f"request {first['index']:,} at {when}"
    return f"requests {first['index']:,}–{last['index']:,} from {when}"


def pool_plots(result: ReplayResult) -> list[PoolPlot]:
    """Every component's device and host pool, in that order."""
    points = result["timeline"]
    if not points:
        return []
    axis = _time_axis(points)
    found = []
    for name in dict.fromkeys(name for point in points for name in point["occupancy"]):
        present = [
            (index, point["occupancy"][name])
            for index, point in enumerate(points)
            if name in point["occupancy"]
        ]
        device = [(index, of["device"]) for index, of in present]
        host = [(index, of["host"]) for index, of in present if of["host"] is not None]
        found.append(_pool_plot(name, "device", axis, device))
        found.append(_pool_plot(name, "host", axis, host))
    return found


def _pool_plot(
    name: str, tier: str, axis: _TimeAxis, samples: Sequence[tuple[int, TierOccupancy]]
) -> PoolPlot:
    capacity = max((pool["capacity"] for _, pool in samples), default=0)
    if not capacity:
        return PoolPlot(name, tier, 0, 0, None)
    indexes = [index for index, _ in samples]
    pools = [pool for _, pool in samples]
    series = {
        "pinned": [pool["pinned"] for pool in pools],
        "private": [pool["private"] for pool in pools],
        "inflight": [pool["in_flight"] for pool in pools],
        "evictable": [pool["evictable"] for pool in pools],
        "free": [pool["free"] for pool in pools],
    }
    plot = Plot(
        f"{name}, {tier} pool: occupancy over time",
        axis.label,
        "slots",
        axis.ticks,
        ticks(capacity, 3, least=1.0),
        stacked_layers(
            axis.xs[indexes],
            [(tone, place(series[tone], capacity)) for _, tone in LEDGER_TONES],
        ),
        [axis.at[index] for index in indexes],
        [axis.labels[index] for index in indexes],
        [Row(label, tone, "count", series[tone]) for label, tone in reversed(LEDGER_TONES)],
    )
    return PoolPlot(name, tier, capacity, max(series["pinned"]), plot)
