"""Geometry of the page's charts: numbers in, ticks and SVG path data out.

Shapes are in a square of `SIZE` units that the page stretches to the plot's area; labels are text
that is placed by percentage. So text is readable at any width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

__all__ = [
    "SIZE",
    "Layer",
    "Plot",
    "Row",
    "Tick",
    "bar_layers",
    "compact",
    "dots_path",
    "line_path",
    "place",
    "stacked_layers",
    "step_for",
    "ticks",
    "time_unit",
]

SIZE = 1000


class Tick(NamedTuple):
    """A label at `at` percent of an axis; every other one is `minor` and yields to space."""

    at: float
    label: str
    minor: bool


class Layer(NamedTuple):
    """One shape of a chart; `tone` is its colour's name in the style sheet.

    `shape`: `"line"`, `"dots"`, or empty for an area.
    """

    tone: str
    path: str
    shape: str = ""


class Row(NamedTuple):
    """One series of a tooltip. `unit` is `"count"` or `"share"`."""

    name: str
    tone: str
    unit: str
    values: Sequence[float]


class Plot(NamedTuple):
    """A chart ready to draw; `at` and `labels` are the tooltip's positions and headings."""

    label: str
    x_label: str
    y_label: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    layers: Sequence[Layer]
    at: Sequence[float]
    labels: Sequence[str]
    rows: Sequence[Row]


def compact(value: float) -> str:
    """A tick's number in at most five characters: `1.5k`, `128k`, `2M`."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def step_for(limit: float, n_ticks: int = 4, least: float = 0.0) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that needs at most `n_ticks` steps."""
    if limit <= 0:
        return 1.0
    raw = max(limit / n_ticks, least)
    power = 10.0 ** math.floor(math.log10(raw))
    for factor in (1.0, 2.0, 2.5, 5.0, 10.0):
        step = power * factor
        if step >= raw * (1 - 1e-9) and (step >= 10 or factor != 2.5 or least < 1):
            return step
    return power * 10.0


def ticks(limit: float, n_ticks: int = 4, *, least: float = 0.0, unit: str = "") -> list[Tick]:
    """Ticks from 0 to at most `limit`, which is the end of the axis."""
    step = step_for(limit, n_ticks, least)
    n_steps = int(limit / step + 1e-9) if limit > 0 else 0
    span = limit if limit > 0 else 1.0
    return [
        Tick(round(100 * index * step / span, 3), compact(index * step) + unit, index % 2 == 1)
        for index in range(n_steps + 1)
    ]


def time_unit(end_s: float) -> tuple[float, str]:
    """Seconds per unit, and the unit, for an axis that ends at `end_s`."""
    if end_s > 3 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if end_s > 600 else (1.0, "s")


def place(values: Iterable[float], limit: float) -> NDArray[np.float64]:
    """Values on an axis from 0 to `limit`, in plot units; everything at 0 on an empty axis."""
    positions = np.asarray(list(values), dtype=np.float64)
    return positions * (SIZE / limit) if limit > 0 else np.zeros_like(positions)


def _points(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> str:
    # SVG's y axis points down.
    return "L".join(f"{x:.1f},{SIZE - y:.1f}" for x, y in zip(xs, ys, strict=True))


def _widen(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """A single sample drawn across the whole plot, so that it is visible."""
    return np.repeat(values, 2) if len(values) == 1 else values


def line_path(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> str:
    """A line through the points; one point becomes a level line."""
    if len(xs) == 0:
        return ""
    across = np.array([0.0, SIZE]) if len(xs) == 1 else xs
    return f"M{_points(across, _widen(ys))}"


def dots_path(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> str:
    """A dot at each point: lines of no length with round ends."""
    return "".join(f"M{x:.1f},{SIZE - y:.1f}h0" for x, y in zip(xs, ys, strict=True))


def stacked_layers(
    xs: NDArray[np.float64], series: Sequence[tuple[str, NDArray[np.float64]]]
) -> list[Layer]:
    """Areas stacked from the bottom, in order; `series` holds `(tone, heights)` in plot units."""
    if len(xs) == 0:
        return []
    across = np.array([0.0, SIZE]) if len(xs) == 1 else xs
    floor = np.zeros(len(across))
    layers = []
    for tone, heights in series:
        top = floor + _widen(heights)
        if (top > floor).any():
            outline = f"M{_points(across, top)}L{_points(across[::-1], floor[::-1])}Z"
            layers.append(Layer(tone, outline))
        floor = top
    return layers


def bar_layers(series: Sequence[tuple[str, NDArray[np.float64]]]) -> list[Layer]:
    """Bars of equal width side by side, each stacked from the bottom, in order."""
    n_bars = len(series[0][1]) if series else 0
    if n_bars == 0:
        return []
    pitch = SIZE / n_bars
    width = min(pitch * 0.84, SIZE / 12)
    floor = np.zeros(n_bars)
    layers = []
    for tone, heights in series:
        path = "".join(
            f"M{(index + 0.5) * pitch - width / 2:.1f},{SIZE - low:.1f}"
            f"h{width:.1f}v{-height:.1f}h{-width:.1f}Z"
            for index, (low, height) in enumerate(zip(floor, heights, strict=True))
            if height > 0
        )
        layers.append(Layer(tone, path))
        floor = floor + heights
    return [layer for layer in layers if layer.path]
