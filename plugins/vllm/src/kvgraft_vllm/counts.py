"""Metrics for vLLM's /metrics: names, and increments since they were last taken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["COUNTERS", "GAUGES", "Metric", "Taken", "Tally"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its description and its labels."""

    text: str
    labels: tuple[str, ...] = ()


COUNTERS: Mapping[str, Metric] = {
    "kvgraft:chunks": Metric(
        "Chunks by call of the store (get, set, exists, touch, remove) and status; other than ok "
        "is a miss, with its reason",
        ("verb", "status"),
    ),
    "kvgraft:hits_ended": Metric(
        "Requests by the KV cache group that ended their hit and the reason; ok: nothing did",
        ("group", "status"),
    ),
    "kvgraft:chunks_refused": Metric(
        "Chunks that were not stored because store_nbytes were on their way"
    ),
    "kvgraft:loads_failed": Metric("Chunks that were there and could not be loaded", ("status",)),
}
GAUGES: Mapping[str, Metric] = {
    "kvgraft:store_up": Metric("1 while the store is asked, 0 while it is left alone", ("access",)),
    "kvgraft:in_flight_bytes": Metric("Bytes on their way", ("direction",)),
    "kvgraft:hanging_threads": Metric("Threads that hang in a call of the store"),
}


@dataclass(frozen=True, slots=True)
class Taken:
    """Numbers by name and labels: increments of counters, current values of gauges."""

    counters: Mapping[tuple[str, tuple[str, ...]], int]
    gauges: Mapping[tuple[str, tuple[str, ...]], float]


class Tally:
    """Counters that are read as increments."""

    def __init__(self) -> None:
        self._totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._told: Counter[tuple[str, tuple[str, ...]]] = Counter()

    def add(self, name: str, *labels: str, n: int = 1) -> None:
        """Count `n` more."""
        self._totals[name, labels] += n

    def set_total(self, name: str, *labels: str, total: int) -> None:
        """Set a total that is counted elsewhere."""
        self._totals[name, labels] = total

    def take(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Counts since the last call."""
        added = {
            key: total - self._told[key]
            for key, total in self._totals.items()
            if total > self._told[key]
        }
        self._told = Counter(self._totals)
        return added
