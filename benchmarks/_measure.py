"""Common parts of the benchmarks: the unit, the clock, the heading and the table.

The unit is one `bytes ==` of 128K int32 tokens: two distinct 512 KiB buffers with equal random
content. Machines and moments differ; a cost in units, both taken in one run, differs less.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from time import thread_time_ns
from typing import NamedTuple

from kvgraft.compiled import is_compiled

__all__ = [
    "FIGURES",
    "Figure",
    "Row",
    "Scale",
    "Unit",
    "arguments",
    "cpu_model",
    "figures",
    "grid",
    "heading",
    "least",
    "table",
    "warm",
]

FIGURES = "KVGRAFT_FIGURES"
"""The environment variable that names the file to which scripts add figures for `builds.py`."""

UNIT_TOKENS = 128 * 1024
UNIT_REPEATS = 8
VECTOR = 32


class Scale(NamedTuple):
    """The unit in ns, by how the two buffers are aligned.

    `memcmp` reads vectors of 32 bytes. Where both buffers start at the same offset in 32 bytes a
    comparison takes about 7/10 of the time. Which of the two a pair gets is the allocator's
    chance, since it aligns to 16 bytes; so is it for the keys and edges of a tree.
    """

    unlike: float
    alike: float

    def __str__(self) -> str:
        return f"{self.unlike / 1e3:.2f} µs (buffers aligned alike: {self.alike / 1e3:.2f} µs)"


def least(scales: Iterable[Scale]) -> Scale:
    """The smaller unit of each kind: the quieter moment, and the stricter one to be measured by."""
    return Scale(*(min(kind) for kind in zip(*scales)))


class Unit:
    """Samples of the unit, taken between the measured samples.

    Each sample is preceded by one comparison that is not timed, so that the unit is not inflated
    by cache misses: ratios to it come out larger, not smaller. The mean of eight comparisons makes
    the clock's own cost small beside them.
    """

    def __init__(self) -> None:
        content = random.Random(0).randbytes(UNIT_TOKENS * 4)
        copies = [bytes(bytearray(content)) for _ in range(2)]
        padding: list[bytes] = []
        while not (unlike := _pair(copies, alike=False)) or not (
            alike := _pair(copies, alike=True)
        ):
            padding.append(bytes(16 * (1 + len(padding) % 7) + UNIT_TOKENS))
            copies.append(bytes(bytearray(content)))
        self._pairs = (unlike, alike)
        self._samples: tuple[list[float], list[float]] = ([], [])

    def sample(self) -> None:
        """One more sample of either kind."""
        for (left, right), samples in zip(self._pairs, self._samples):
            equal = left == right
            start = thread_time_ns()
            for _ in range(UNIT_REPEATS):
                equal = left == right
            samples.append((thread_time_ns() - start) / UNIT_REPEATS)
            assert equal

    def take(self) -> Scale:
        """The medians of the samples so far; starts anew."""
        scale = Scale(*(statistics.median(samples) for samples in self._samples))
        self._samples = ([], [])
        return scale


def _pair(copies: Sequence[bytes], *, alike: bool) -> tuple[bytes, bytes] | None:
    """Two of the copies that start at the same offset in a vector, or at different ones."""
    for place, left in enumerate(copies):
        for right in copies[:place]:
            if ((id(left) - id(right)) % VECTOR == 0) is alike:
                return left, right
    return None


class Row(NamedTuple):
    """One line of a table: its name, its cost in ns, the unit, the bar in units if there is one."""

    name: str
    cost: float
    scale: Scale
    bar: float | None = None

    def cells(self) -> list[str]:
        """Name, µs, units, units of the faster kind, bar, verdict."""
        unlike, alike = self.cost / self.scale.unlike, self.cost / self.scale.alike
        bar = verdict = ""
        if self.bar is not None:
            bar = f"{self.bar:g}"
            verdict = (
                "ok" if alike <= self.bar else "ok, not alike" if unlike <= self.bar else "over"
            )
        return [self.name, f"{self.cost / 1e3:.2f}", f"{unlike:.2f}", f"{alike:.2f}", bar, verdict]


class Figure(NamedTuple):
    """A number that both builds of the core are compared by.

    Attributes:
        group: the benchmark's subject.
        name: what was measured.
        value: in `measure`.
        measure: such as µs or calls.
        units: the same in units of `bytes ==`, where that makes sense.
        bars: the most it may be, plain and compiled: in units where those are given.
    """

    group: str
    name: str
    value: float
    measure: str = "µs"
    units: float | None = None
    bars: tuple[float | None, float | None] = (None, None)


def figures(found: Iterable[Figure]) -> None:
    """Add them to the file that `FIGURES` names, a line each; nothing where it names none."""
    path = os.environ.get(FIGURES)
    if path:
        with open(path, "a", encoding="utf-8") as lines:
            for each in found:
                lines.write(json.dumps({**each._asdict(), "compiled": is_compiled()}) + "\n")


def warm(operation: Callable[[], None], calls: int = 4) -> float:
    """CPU ns per call, after as many that are not timed: warm, as the unit is."""
    for _ in range(calls):
        operation()
    start = thread_time_ns()
    for _ in range(calls):
        operation()
    return (thread_time_ns() - start) / calls


def table(rows: Iterable[Row], first: str = "") -> None:
    """Print rows of costs."""
    grid([first, "µs", "units", "alike", "bar", ""], [row.cells() for row in rows])


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print aligned columns, the first to the left."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:])]
        print("  ".join(cells).rstrip())
    print(flush=True)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller sizes")
    return parser


def heading(title: str, **facts: object) -> None:
    """Print the conditions of the measurement."""
    facts = {
        "kvgraft": f"{_version('kvgraft')}, {'compiled' if is_compiled() else 'plain'} build",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "cpu": f"{cpu_model()}, {os.cpu_count()} cores",
        "load": " ".join(f"{value:.2f}" for value in os.getloadavg()),
        "clock": "CPU time of the calling thread",
        "gc": f"on, thresholds {gc.get_threshold()}" if gc.isenabled() else "off",
        **facts,
    }
    print(f"# {title}")
    for name, value in facts.items():
        print(f"#   {name}: {value}")
    print(flush=True)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
