"""The text of `/metrics`: the engine's counts and the pools' ledgers, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgraft import StorageTier
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
        for component in engine.memory.cache.tree.components:
            for tier, ledger, evictions in (
                ("device", component.device, component.device_evictions),
                ("host", component.host, component.host_evictions),
            ):
                if ledger is None:
                    continue
                for owner, count in ledger.counts().items():
                    if owner != "capacity":
                        slots.add_metric([component.name, tier, owner], count)
                for cause, count in list(evictions.items()):
                    evicted.add_metric([component.name, tier, str(cause)], count)
        yield slots
        yield evicted
        storage = engine.memory.cache.storage
        if storage:
            yield from _storage(storage)


def _storage(tier: StorageTier) -> Iterator[Metric]:
    """The storage tier's counts; another thread changes them, so they are copied whole."""
    for name, text, counts in (
        ("prefetches", "prefetches of queued requests, by event", tier.prefetching.counts),
        ("stores", "nodes and slots on their way to storage, by event", tier.storing.counts),
    ):
        events = CounterMetricFamily(f"kvgraft_{name}", text, labels=["event"])
        for event, count in dict(counts).items():
            events.add_metric([event], count)
        yield events
    keys = CounterMetricFamily(
        "kvgraft_storage_keys", "keys asked of storage", labels=["verb", "status"]
    )
    for name, count in tier.client.counters.snapshot().items():
        keys.add_metric(name.split(".", 1), count)
    yield keys
    under_way = GaugeMetricFamily(
        "kvgraft_storage_in_flight", "prefetches and stores under way", labels=["direction"]
    )
    under_way.add_metric(["prefetch"], tier.prefetching.n_in_flight)
    under_way.add_metric(["store"], tier.storing.n_in_flight)
    yield under_way
    breaker = GaugeMetricFamily(
        "kvgraft_storage_breaker", "1 for the state of storage's circuit breaker", labels=["state"]
    )
    for state in BreakerState:
        breaker.add_metric([state.value], tier.client.state is state)
    yield breaker


def render_metrics(worker: EngineWorker) -> bytes:
    """The numbers now, in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_EngineCollector(worker))
    return generate_latest(registry)
