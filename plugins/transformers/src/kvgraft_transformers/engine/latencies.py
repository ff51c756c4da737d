"""Latencies of requests, as Prometheus histograms that a scraper can read at any time."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Histogram, Metric
from prometheus_client.registry import Collector

__all__ = ["BOUNDS_S", "Latencies"]

BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)
"""Upper bounds of the buckets, in seconds; the last bucket has none."""


class Latencies(Collector):
    """Durations of an engine's requests, in seconds; `observe` counts one.

    The names are vLLM's, which has none for load-backs.

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
        self.queue = _histogram(
            "request_queue_time_seconds", "from a request to its first admission"
        )
        self.load_back = _histogram(
            "load_back_time_seconds", "from an admission to the arrival of its host data"
        )
        self.first_token = _histogram(
            "time_to_first_token_seconds", "from a request to its first token"
        )
        self.between_tokens = _histogram(
            "inter_token_latency_seconds", "from a token to the request's next one"
        )
        self.whole = _histogram("e2e_request_latency_seconds", "from a request to its last token")

    def collect(self) -> Iterator[Metric]:
        """All of them, for a registry of Prometheus."""
        for each in vars(self).values():
            yield from each.collect()


def _histogram(name: str, text: str) -> Histogram:
    return Histogram(f"kvgraft_{name}", f"seconds {text}", buckets=BOUNDS_S, registry=None)
