"""Latencies of requests, as histograms that a scraper can read at any time."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

__all__ = ["BOUNDS_S", "Histogram", "Latencies"]

BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
"""Upper bounds of the buckets, in seconds; the last bucket has none."""


class Histogram:
    """Counts durations by bucket. One thread records, any thread may read.

    Attributes:
        counts: durations per bucket, not cumulative; one more than there are bounds.
        total_s: sum of the durations, in seconds.
    """

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.total_s = 0.0

    def record(self, seconds: float) -> None:
        """Count a duration."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def n(self) -> int:
        """Number of durations."""
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Cumulative buckets, as in Prometheus: each bound with the durations at or below it."""
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts))))


class Latencies:
    """Durations of an engine's requests, in seconds.

    Attributes:
        queue: from `submit` until a request is admitted for the first time; the wait for storage
            is part of it.
        load_back: from an admission until the request's prefix has arrived from the host, for
            requests with a load-back.
        first_token: from `submit` until the first token.
        between_tokens: from a request's token to its next one, retractions included.
        whole: from `submit` until the last token.
    """

    def __init__(self) -> None:
        self.queue = Histogram()
        self.load_back = Histogram()
        self.first_token = Histogram()
        self.between_tokens = Histogram()
        self.whole = Histogram()
