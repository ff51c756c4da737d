"""A collector of Prometheus' client for caches: counts are read when they are scraped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgraft import Cache, ConfigError
from kvgraft_observe import metrics
from kvgraft_observe.metrics import METRICS, Kind

__all__ = ["CacheCollector"]

Family = CounterMetricFamily | GaugeMetricFamily


class CacheCollector(Collector):
    """Metrics of one cache, or of several by name: `REGISTRY.register(CacheCollector(cache))`.

    A scrape calls `stats()` of every cache, on the scraping thread, and nothing else costs
    anything.

    Args:
        caches: a cache, or caches by name: then every sample has its name as the label `cache`.

    Raises:
        ConfigError: neither.
    """

    def __init__(self, caches: Cache | Mapping[str, Cache]) -> None:
        named = isinstance(caches, Mapping)
        self._caches = dict(caches) if isinstance(caches, Mapping) else {"": caches}
        for each in self._caches.values():
            if not isinstance(each, Cache):
                raise ConfigError(
                    f"CacheCollector: a {type(each).__name__} is no cache; give a Cache, or a "
                    "mapping from names to caches"
                )
        self._prefix = ("cache",) if named else ()

    def describe(self) -> Iterator[Metric]:
        """The metrics' names, without numbers."""
        for metric in METRICS:
            yield self._family(metric)

    def collect(self) -> Iterator[Metric]:
        """The numbers now."""
        families = [(metric, self._family(metric)) for metric in METRICS]
        for name, cache in self._caches.items():
            stats, prefix = cache.stats(), (name,) if self._prefix else ()
            for metric, family in families:
                for labels, value in metric.read(stats):
                    family.add_metric((*prefix, *labels), value)
        for _, family in families:
            if family.samples:
                yield family

    def _family(self, metric: metrics.Metric) -> Family:
        name, labels = metric.name.replace(".", "_"), (*self._prefix, *metric.labels)
        family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        return family(name, metric.text, labels=labels)
