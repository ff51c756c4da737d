"""Counts of keys by verb and status."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from kvgraft_storage.status import Status

__all__ = ["Counters"]


class Counters:
    """Counts by name, such as `get.miss`; added to by every thread."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1) -> None:
        """Count `n` more of something."""
        with self._lock:
            self._counts[name] += n

    def add_statuses(self, verb: str, statuses: Iterable[Status]) -> None:
        """Count a call's keys by how they ended."""
        values = [status._value_ for status in statuses]
        with self._lock:
            for value in {*values}:
                self._counts[f"{verb}.{value}"] += values.count(value)

    def snapshot(self) -> dict[str, int]:
        """All counts, by name."""
        with self._lock:
            return dict(sorted(self._counts.items()))
