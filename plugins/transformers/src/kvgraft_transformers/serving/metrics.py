"""The text of `/metrics`: the engine's counts and latencies, and the cache's metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgraft_observe.prometheus import CacheCollector
from kvgraft_transformers.serving.worker import EngineWorker

__all__ = ["ServerMetrics"]

COUNTERS = {
    "requests": "requests submitted",
    "finished": "requests answered to their end",
    "aborted": "requests given up, by clients or by failures",
    "failed": "requests that ended because the model or a copy failed",
    "rejected": "requests too large for the pools",
    "prompt_tokens": "prompt tokens of admitted requests",
    "cached_tokens": "prompt tokens that were not computed",
    "host_tokens": "cached prompt tokens that came from the host",
    "storage_tokens": "cached prompt tokens that storage brought to the host",
    "generated_tokens": "tokens produced",
    "draft_tokens": "drafts that were verified",
    "accepted_tokens": "drafts that were produced",
    "deferrals": "times a request did not fit yet",
    "retractions": "times a running request made room for others",
    "followers": "requests that waited while another computed their prefix",
    "passes": "forward passes",
}


class _EngineCollector(Collector):
    """Reads the numbers at each scrape."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        engine = self._worker.engine
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvgraft_{name}", text, getattr(engine.totals, name))
        yield CounterMetricFamily(
            "kvgraft_failed_steps", "engine steps that raised", self._worker.failures
        )
        yield from engine.latencies.collect()
        schedule = engine.schedule
        for name, line in (
            ("fetching", schedule.fetching),
            ("running", schedule.running),
            ("following", schedule.following),
            ("loading", schedule.loading),
            ("waiting", schedule.waiting),
        ):
            yield GaugeMetricFamily(f"kvgraft_{name}_requests", f"requests {name}", len(line))


class ServerMetrics:
    """The metrics of a server: its engine's and its cache's.

    Args:
        worker: the engine's thread.
    """

    def __init__(self, worker: EngineWorker) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(worker))
        self._registry.register(CacheCollector(worker.engine.memory.cache))

    def render(self) -> bytes:
        """The numbers now, in Prometheus' text format."""
        return generate_latest(self._registry)
