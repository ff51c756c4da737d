"""The collector shows every number that a cache counts, under names that do not clash."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvgraft import Cache
from kvgraft_observe.metrics import METRICS, Kind
from kvgraft_observe.prometheus import CacheCollector
from tests.commands import ROOT
from tests.serving import life

from .counts import distinct_counts, leaves

SUFFIX = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_seconds"}
READ = {metric.name: metric.read for metric in METRICS if metric.read is not None}
COUNTED = [metric for metric in METRICS if metric.name in READ]


@pytest.fixture(name="cache")
def served_cache() -> Iterator[Cache]:
    """Two requests went through it."""
    components = {"full": {}, "swa": {"window": 64}, "hisparse": {}}
    with Cache.open(components, page_size=16, device_tokens=1024, host_tokens=2048) as cache:
        life.serve(cache, range(200))
        life.serve(cache, range(200))
        cache.drain()
        yield cache


def scraped(collector: CacheCollector) -> dict[str, float]:
    """Every sample by its name and labels, through Prometheus' text and its parser."""
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for family in families
        for sample in family.samples
    }


def value(samples: dict[str, float], name: str, **labels: str) -> float:
    return samples[f"{name}{sorted(labels.items())}"]


def test_every_count_of_a_cache_is_in_some_metric() -> None:
    stats = distinct_counts()
    shown = {sample.value for metric in COUNTED for sample in READ[metric.name](stats)}
    missing = [where for where, number in leaves(stats) if number not in shown]
    assert missing == [], "give each a row in kvgraft_observe.metrics.METRICS"


def test_no_metric_has_two_samples_with_the_same_labels() -> None:
    stats = distinct_counts()
    for metric in COUNTED:
        samples = [sample.labels for sample in READ[metric.name](stats)]
        assert samples, metric.name
        assert len(set(samples)) == len(samples), metric.name
        assert {len(labels) for labels in samples} == {len(metric.labels)}, metric.name
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_scrape_shows_the_counts_of_the_moment(cache: Cache) -> None:
    collector = CacheCollector(cache)
    samples, stats = scraped(collector), cache.stats()
    assert value(samples, "kvgraft_tokens_total", tier="device") == 192
    assert value(samples, "kvgraft_tokens_total", tier="none") == 208
    assert value(samples, "kvgraft_hit_slots_total", component="swa", tier="device") == 4
    owners = stats.components["full"].device.owners
    for owner, slots in owners.items():
        shown = value(samples, "kvgraft_slots", component="full", tier="device", owner=owner)
        assert shown == slots
    assert stats.components["hisparse"].private
    assert value(
        samples, "kvgraft_slots", component="hisparse", tier="private 0", owner="free"
    ) == (stats.components["hisparse"].private[0].free)
    assert not any(name.startswith("kvgraft_storage") for name in samples)
    life.serve(cache, range(200))
    assert value(scraped(collector), "kvgraft_admitted_requests_total") == 3


def test_durations_and_reasons_are_counted_from_when_the_collector_is_made(cache: Cache) -> None:
    collector = CacheCollector(cache, explain_every=2)
    assert value(scraped(collector), "kvgraft_match_duration_seconds_count") == 0
    for _ in range(3):
        life.serve(cache, range(300))
    samples = scraped(collector)
    for name in ("match_duration", "admission_wait"):
        assert value(samples, f"kvgraft_{name}_seconds_count") == 3
        assert value(samples, f"kvgraft_{name}_seconds_bucket", le="+Inf") == 3
        assert value(samples, f"kvgraft_{name}_seconds_sum") > 0
    outcome = {"outcome": "reused", "component": ""}
    assert value(samples, "kvgraft_explained_tokens_total", **outcome) == 192 + 288
    outcome = {"outcome": "unknown", "component": ""}
    assert value(samples, "kvgraft_explained_tokens_total", **outcome) == 96
    collector.close()
    life.serve(cache, range(300))
    samples = scraped(collector)
    assert value(samples, "kvgraft_match_duration_seconds_count") == 3
    assert value(samples, "kvgraft_admitted_requests_total") == 6


def test_caches_with_names_have_a_label_of_their_own(cache: Cache) -> None:
    with Cache.open(["full"], page_size=16, device_tokens=256) as other:
        samples = scraped(CacheCollector({"large": cache, "small": other}))
        slots = {"component": "full", "tier": "device", "owner": "free"}
        assert value(samples, "kvgraft_slots", cache="small", **slots) == 16
        assert value(samples, "kvgraft_admitted_requests_total", cache="large") == 2


def test_names_are_as_prometheus_and_opentelemetry_ask_for() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"kvgraft\.[a-z]+(_[a-z]+)*", metric.name), metric.name
        assert re.fullmatch(r"1|s|By|\{[a-z]+\}", metric.unit), metric.name
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket"))


def test_the_package_and_its_table_need_no_client_library() -> None:
    code = (
        "import sys, kvgraft_observe.metrics\n"
        "loaded = {'prometheus_client', 'zmq', 'msgspec', 'opentelemetry'} & {*sys.modules}\n"
        "assert not loaded, loaded\n"
        "assert 'kvgraft_storage' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_lists_every_metric_with_its_labels() -> None:
    readme = (ROOT / "plugins" / "observe" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(kvgraft_\w+)` \| (.*?) ?\| \w", readme, re.MULTILINE)
    assert listed == [
        (
            metric.name.replace(".", "_") + SUFFIX[metric.kind],
            ", ".join(f"`{label}`" for label in metric.labels),
        )
        for metric in METRICS
    ]
