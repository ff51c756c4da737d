"""CPU time by operation and request."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from kvgraft_replay.report.schema import Quantiles

__all__ = ["OPERATIONS", "Meter", "Unmetered"]

OPERATIONS = (
    "key",
    "prefetch",
    "announce",
    "match",
    "admit",
    "load_back",
    "allocate",
    "computed",
    "checkpoint",
    "finish",
    "poll",
)

T = TypeVar("T")


class Meter:
    """Sums the scheduler thread's CPU time per request and operation, in nanoseconds."""

    def __init__(self) -> None:
        self._open: dict[int, dict[str, int]] = {}
        self._done: list[dict[str, int]] = []
        self._shared = dict.fromkeys(OPERATIONS, 0)

    def run(self, operation: str, request: int | None, call: Callable[..., T], *args: object) -> T:
        """Call a function and charge its time to a request, or to all alike (None)."""
        start = time.thread_time_ns()
        try:
            return call(*args)
        finally:
            spent = time.thread_time_ns() - start
            if request is None:
                self._shared[operation] += spent
            else:
                books = self._open.setdefault(request, {})
                books[operation] = books.get(operation, 0) + spent

    def close(self, request: int) -> None:
        """The request was served; its times are final."""
        self._done.append(self._open.pop(request, {}))

    def share(self, request: int) -> None:
        """The request was not served: its times are divided among the served ones."""
        for operation, spent in self._open.pop(request, {}).items():
            self._shared[operation] += spent

    def quantiles(self) -> dict[str, Quantiles]:
        """p50, p99 and mean in µs per served request and operation, and `"total"`.

        Zeros where no request was served.
        """
        n = len(self._done)
        shared = {name: spent / max(n, 1) for name, spent in self._shared.items()}
        columns = {
            name: np.array([books.get(name, 0) for books in self._done], dtype=np.float64)
            + shared[name]
            for name in OPERATIONS
        }
        columns["total"] = sum(columns.values(), np.zeros(n))
        return {
            name: {
                "p50": float(np.percentile(values, 50)) / 1e3 if n else 0.0,
                "p99": float(np.percentile(values, 99)) / 1e3 if n else 0.0,
                "mean": float(values.mean()) / 1e3 if n else 0.0,
            }
            for name, values in columns.items()
        }


class Unmetered(Meter):
    """Calls without reading the clock: two reads take as long as a small operation."""

    def run(self, operation: str, request: int | None, call: Callable[..., T], *args: object) -> T:
        """Call the function."""
        del operation, request
        return call(*args)
