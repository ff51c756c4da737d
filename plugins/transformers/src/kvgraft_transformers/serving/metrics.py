"""The text of `/metrics`: the engine's counts and the pools' ledgers, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvgraft.stats import StorageStats
from kvgraft.storage import BreakerState
from kvgraft_transformers.serving.worker import EngineWorker

__all__ = ["render_metrics"]

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
    "computed_tokens": "tokens through the model",
    "generated_tokens": "tokens produced",
    "deferrals": "times a request did not fit yet",
    "retractions": "times a running request made room for others",
    "passes": "forward passes",
}


LATENCIES = {
    "time_to_first_token_seconds": ("first_token", "from a request to its first token"),
    "inter_token_latency_seconds": ("between_tokens", "from a token to the request's next one"),
    "e2e_request_latency_seconds": ("whole", "from a request to its last token"),
    "request_queue_time_seconds": ("queue", "from a request to its first admission"),
    "load_back_time_seconds": ("load_back", "from an admission to the arrival of its host data"),
}
"""Histograms, named as vLLM names them; it has none for load-backs."""


class _EngineCollector(Collector):
    """Reads the numbers when they are asked for."""

    def __init__(self, worker: EngineWorker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        engine = self._worker.engine
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"kvgraft_{name}", text, getattr(engine.totals, name))
        yield CounterMetricFamily(
            "kvgraft_failed_steps", "engine steps that raised", self._worker.failures
        )
        for name, (attribute, text) in LATENCIES.items():
            histogram = getattr(engine.latencies, attribute)
            yield HistogramMetricFamily(
                f"kvgraft_{name}",
                f"seconds {text}",
                buckets=histogram.cumulative(),
                sum_value=histogram.total_s,
            )
        schedule = engine.schedule
        for name, line in (
            ("fetching", schedule.fetching),
            ("running", schedule.running),
            ("loading", schedule.loading),
            ("waiting", schedule.waiting),
        ):
            yield GaugeMetricFamily(f"kvgraft_{name}_requests", f"requests {name}", len(line))
        slots = GaugeMetricFamily(
            "kvgraft_slots", "slots of each pool by owner", labels=["component", "tier", "owner"]
        )
        evicted = CounterMetricFamily(
            "kvgraft_evicted_slots", "slots evicted", labels=["component", "tier", "cause"]
        )
        hits = CounterMetricFamily(
            "kvgraft_hit_slots",
            "slots that admitted requests resume from",
            labels=["component", "tier"],
        )
        stats = engine.memory.cache.stats()
        for name, component in stats.components.items():
            for tier, pool in (("device", component.device), ("host", component.host)):
                if pool is None:
                    continue
                for owner, count in pool.owners.items():
                    slots.add_metric([name, tier, owner], count)
                for cause, count in pool.evicted.items():
                    evicted.add_metric([name, tier, cause], count)
            for tier, count in component.hits._asdict().items():
                hits.add_metric([name, tier], count)
        yield slots
        yield evicted
        yield hits
        if stats.storage is not None:
            yield from _storage(stats.storage)


def _storage(tier: StorageStats) -> Iterator[Metric]:
    """The storage tier's counts."""
    for name, text, counts in (
        ("prefetches", "prefetches of queued requests, by event", tier.prefetches),
        ("stores", "nodes and slots on their way to storage, by event", tier.stores),
    ):
        events = CounterMetricFamily(f"kvgraft_{name}", text, labels=["event"])
        for event, count in counts.items():
            events.add_metric([event], count)
        yield events
    keys = CounterMetricFamily(
        "kvgraft_storage_keys", "keys asked of storage", labels=["verb", "status"]
    )
    for verb, by_status in tier.keys.items():
        for status, count in by_status.items():
            keys.add_metric([verb, status], count)
    yield keys
    under_way = GaugeMetricFamily(
        "kvgraft_storage_in_flight", "prefetches and stores under way", labels=["direction"]
    )
    under_way.add_metric(["prefetch"], tier.prefetches_in_flight)
    under_way.add_metric(["store"], tier.stores_in_flight)
    yield under_way
    breaker = GaugeMetricFamily(
        "kvgraft_storage_breaker", "1 for the state of storage's circuit breaker", labels=["state"]
    )
    for state in BreakerState:
        breaker.add_metric([state.value], tier.breaker == state.value)
    yield breaker


def render_metrics(worker: EngineWorker) -> bytes:
    """The numbers now, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(worker))
    return generate_latest(registry)
