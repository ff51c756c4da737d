"""A plan as one HTML page: no other file, no network."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvgraft.sizes import format_nbytes
from kvgraft_replay.planning.tables import in_order, plan_tables
from kvgraft_replay.report.html import plot_context, render_page
from kvgraft_replay.report.plot import (
    SIZE,
    Layer,
    Plot,
    Row,
    Tick,
    bar_layers,
    dots_path,
    line_path,
    place,
    step_for,
    ticks,
)
from kvgraft_replay.report.summary import count, percent, seconds, settings_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvgraft_replay.planning.schema import PlanResult, SizeResult

__all__ = ["render_plan"]

TONES = ("device", "host", "both", "storage", "pinned", "computed")
"""Colours of the lines, one for each size of HOST with each policy."""


AXIS = 1.04
"""The axis extends a little beyond the last dot."""

MOST_NAMES = 8
"""Most bars with room for names of sizes; more are numbered."""


class Series(NamedTuple):
    """The sizes with one HOST size and one policy, by DEVICE size, and their colour."""

    name: str
    tone: str
    sizes: list[SizeResult]


def render_plan(plan: PlanResult) -> str:
    """The page as text."""
    series = _series(plan)
    rates, tiers = _rate_plot(plan, series), _tier_plot(plan)
    best = max(plan["sizes"], key=lambda size: size["token_hit_rate"])
    return render_page(
        "planning/plan.html.j2",
        {
            **plot_context([rates, tiers]),
            "title": f"plan for {plan['workload']['name']}",
            "plan": plan,
            "series": series,
            "rate_plot": rates,
            "tier_plot": tiers,
            "best": best,
            "best_name": _size_name(best),
            "tables": plan_tables(plan),
            "settings": [
                *settings_rows({"components": plan["components"]}),
                *settings_rows(plan["settings"]),
            ],
            "count": count,
            "percent": percent,
            "seconds": seconds,
            "needed": _needed(plan),
            "target": ""
            if plan["target"] is None
            else percent(plan["target"]["token_hit_rate"], 1),
        },
    )


def _size_name(size: SizeResult) -> str:
    host = "" if size["host"] == "none" else f" + {size['host']} host"
    return f"{size['device']} device{host}, {size['policy']}"


def _short_name(size: SizeResult) -> str:
    """A short name for a bar; policies of one size are side by side."""
    return size["device"] if size["host"] == "none" else f"{size['device']}, {size['host']}"


def _share(size: SizeResult, tokens: int) -> float:
    return tokens / size["input_tokens"] if size["input_tokens"] else 0.0


def _series(plan: PlanResult) -> list[Series]:
    kinds = dict.fromkeys((size["host"], size["policy"]) for size in plan["sizes"])
    several = len({policy for _, policy in kinds}) > 1
    found = []
    for index, (host, policy) in enumerate(kinds):
        name = "no host" if host == "none" else f"host {host}"
        same = (s for s in plan["sizes"] if (s["host"], s["policy"]) == (host, policy))
        found.append(
            Series(
                f"{name}, {policy}" if several else name,
                TONES[index % len(TONES)],
                sorted(same, key=lambda size: size["device_nbytes"]),
            )
        )
    return found


def _needed(plan: PlanResult) -> str:
    """The size of DEVICE at which the exact curve becomes flat."""
    tokens = plan["curve"]["needed_tokens"]
    return f"{count(tokens)} tokens" if tokens else ""


def _rate_plot(plan: PlanResult, series: Sequence[Series]) -> Plot:
    """Hit rate by bytes of DEVICE: a line for each HOST size, and the exact curve."""
    curve = plan["curve"]["points"]
    largest = max(size["device_nbytes"] for size in plan["sizes"])
    end = max([AXIS * largest, *(point["nbytes"] for point in curve)])
    rates = [size["token_hit_rate"] for size in plan["sizes"]]
    target = plan["target"]
    wanted = [] if target is None else [target["token_hit_rate"]]
    top = _top([*rates, *wanted, *(point["token_hit_rate"] for point in curve)])
    layers = [
        Layer("overall", line_path(place([0, end], end), place([rate] * 2, top)), "line")
        for rate in wanted
    ]
    if curve:
        xs = place([point["nbytes"] for point in curve], end)
        ys = place([point["token_hit_rate"] for point in curve], top)
        layers.append(Layer("computed", line_path(xs, ys), "line"))
    for each in series:
        xs = place([size["device_nbytes"] for size in each.sizes], end)
        ys = place([size["token_hit_rate"] for size in each.sizes], top)
        if len(xs) > 1:
            layers.append(Layer(each.tone, line_path(xs, ys), "line"))
        layers.append(Layer(each.tone, dots_path(xs, ys), "dots"))
    # a search tries different sizes with each HOST size; these have a dot and no row
    devices = sorted(
        set.intersection(*({size["device_nbytes"] for size in each.sizes} for each in series))
    )
    per_unit, unit = _byte_unit(end)
    return Plot(
        "Token hit rate by size of DEVICE",
        f"device pools ({unit})",
        "of input tokens",
        ticks(end / per_unit, 6),
        _rate_ticks(top),
        layers,
        [round(float(x) / SIZE * 100, 2) for x in place(devices, end)],
        [f"device {format_nbytes(nbytes)}" for nbytes in devices],
        _rate_rows(series, devices),
    )


def _rate_rows(series: Sequence[Series], devices: Sequence[int]) -> list[Row]:
    """A row for each HOST size."""
    rows = []
    for each in series:
        rates = {size["device_nbytes"]: size["token_hit_rate"] for size in each.sizes}
        rows.append(Row(each.name, each.tone, "share", [rates[nbytes] for nbytes in devices]))
    return rows


def _tier_plot(plan: PlanResult) -> Plot:
    """For each size, the tiers of its hits."""
    sizes = in_order(plan)
    shares = {
        "device": [_share(size, size["hit_tokens"]["device"]) for size in sizes],
        "host": [_share(size, size["hit_tokens"]["host"]) for size in sizes],
    }
    top = _top([a + b for a, b in zip(*shares.values())])
    places = [(index + 0.5) * 100 / len(sizes) for index in range(len(sizes))]
    names = [_short_name(size) for size in sizes]
    if len(names) > MOST_NAMES:
        names = [str(number) for number in range(1, len(names) + 1)]
    saved = [size["prefill_s_saved"] for size in sizes]
    return Plot(
        "Hits by tier at each size",
        "device and host, by size, as in the tables",
        "of input tokens",
        [Tick(at, name, index % 2 == 1) for index, (at, name) in enumerate(zip(places, names))],
        _rate_ticks(top),
        bar_layers([(tier, place(values, top)) for tier, values in shares.items()]),
        [round(at, 2) for at in places],
        [_size_name(size) for size in sizes],
        [
            Row("on host", "host", "share", shares["host"]),
            Row("on device", "device", "share", shares["device"]),
            Row("prefill saved, s", "", "count", saved),
        ],
    )


def _top(rates: Sequence[float]) -> float:
    """The end of an axis of rates: a round percentage above all of them."""
    highest = 100 * max(rates, default=0.0)
    step = step_for(max(highest, 1.0), 4)
    return min(100.0, step * (int(highest / step) + 1)) / 100


def _rate_ticks(top: float) -> list[Tick]:
    return ticks(100 * top, 4, unit=" %")


def _byte_unit(nbytes: float) -> tuple[float, str]:
    """Bytes per unit, and the unit, for an axis with this end."""
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= 2 * size:
            return size, unit
    return 1.0, "B"
