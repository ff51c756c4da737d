"""A collector for Prometheus' client: it reads a cache's counts at each scrape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from kvgraft import Cache, ConfigError
from kvgraft_observe.arguments import expect_type
from kvgraft_observe.metrics import EXPLAINED, METRICS, Kind, Metric
from kvgraft_observe.steps import EXPLAIN_EVERY, Outcome, Steps, expect_steps

__all__ = ["CacheCollector"]

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class CacheCollector(Collector):
    """Metrics of one cache, or of several by name: `REGISTRY.register(CacheCollector(cache))`.

    A scrape calls `stats()` of every cache, on the scraping thread. Durations are measured on the
    caches' own threads, until `close`.

    Args:
        caches: a cache, or caches by name; with names, every sample has the label `cache`.
        explain_every: explain one in so many admitted requests: why their prefixes were not longer;
            0 for none.

    Raises:
        ConfigError: neither a cache nor caches by names, or a negative number.
    """

    def __init__(
        self, caches: Cache | Mapping[str, Cache], *, explain_every: int = EXPLAIN_EVERY
    ) -> None:
        named = isinstance(caches, Mapping)
        self._prefix = ("cache",) if named else ()
        found = dict(caches) if isinstance(caches, Mapping) else {"": caches}
        if not found:
            raise ConfigError("CacheCollector: no cache in {}; give a Cache, or caches by name")
        for name, each in found.items():
            expect_type("CacheCollector: name", name, str, "texts as names of caches")
            expect_steps("CacheCollector", each, explain_every)
        self._watched = [
            _Watched((name,) if named else (), cache, explain_every)
            for name, cache in found.items()
        ]

    def close(self) -> None:
        """Stop measuring durations; counts can still be scraped."""
        for each in self._watched:
            each.steps.close()

    def describe(self) -> Iterator[Family]:
        """The metrics' names, without numbers."""
        for metric in METRICS:
            yield self._family(metric)

    def collect(self) -> Iterator[Family]:
        """The numbers now."""
        families = [(metric, self._family(metric)) for metric in METRICS]
        for watched in self._watched:
            watched.add_to(families)
        for _, family in families:
            if family.samples:
                yield family

    def _family(self, metric: Metric) -> Family:
        name, labels = metric.name.replace(".", "_"), (*self._prefix, *metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            return HistogramMetricFamily(f"{name}_seconds", metric.text, labels=labels)
        family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        return family(name, metric.text, labels=labels)


class _Watched:
    """One cache, and the measurements of its steps.

    Args:
        prefix: values of the labels that come before a metric's own.
        cache: the cache.
        explain_every: as for `Steps`.
    """

    def __init__(self, prefix: tuple[str, ...], cache: Cache, explain_every: int) -> None:
        self._prefix = prefix
        self._cache = cache
        self._durations: dict[tuple[str, tuple[str, ...]], _Durations] = {
            (metric.name, ()): _Durations(metric.bounds)
            for metric in METRICS
            if metric.kind is Kind.HISTOGRAM and not metric.labels
        }
        self._explained: dict[tuple[str, ...], int] = {}
        self.steps = Steps(cache, self, explain_every)

    def record(self, metric: Metric, seconds: float, *labels: str) -> None:
        durations = self._durations.get((metric.name, labels))
        if durations is None:
            durations = self._durations[metric.name, labels] = _Durations(metric.bounds)
        durations.add(seconds)

    def count(self, outcome: Outcome) -> None:
        labels = (outcome.outcome, outcome.component)
        self._explained[labels] = self._explained.get(labels, 0) + outcome.tokens

    def add_to(self, families: list[tuple[Metric, Family]]) -> None:
        """Add its samples, on any thread."""
        stats = self._cache.stats()
        durations = list(self._durations.items())
        for metric, family in families:
            if isinstance(family, HistogramMetricFamily):
                for (name, labels), found in durations:
                    if name == metric.name:
                        buckets, total = found.buckets()
                        family.add_metric((*self._prefix, *labels), buckets, total)
            elif metric is EXPLAINED:
                for labels, tokens in list(self._explained.items()):
                    family.add_metric((*self._prefix, *labels), tokens)
            elif metric.read is not None:
                for labels, value in metric.read(stats):
                    family.add_metric((*self._prefix, *labels), value)


class _Durations:
    """A histogram of durations: one thread adds, any thread reads.

    Args:
        bounds: upper bounds of the buckets, in seconds.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self._total += seconds
        self._counts[bisect_left(self._bounds, seconds)] += 1

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """The cumulative count at every bound, and the sum."""
        counts, total, found, number = list(self._counts), self._total, [], 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), counts):
            number += count
            found.append((bound, float(number)))
        return found, total
