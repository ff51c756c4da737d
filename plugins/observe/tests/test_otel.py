"""Metrics and spans of a cache, as OpenTelemetry's SDK exports them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from kvgraft import Cache, TokenKey
from kvgraft_observe import otel
from kvgraft_observe.metrics import MATCH, METRICS
from kvgraft_observe.otel import CacheMetrics, RequestSpans

from .listening import serve

ABSENT = ("kvgraft.storage", "kvgraft.prefetch", "kvgraft.tenant", "kvgraft.prefix")
"""Beginnings of the names of metrics that a plain cache does not have."""


@pytest.fixture(name="cache")
def made_cache() -> Iterator[Cache]:
    with Cache.open({"full": {}}, page_size=8, device_tokens=128, host_tokens=512) as cache:
        yield cache


def collected(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Metrics by name."""
    found = reader.get_metrics_data()
    if found is None:
        return {}
    return {
        metric.name: metric
        for resource in found.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def points(metric: Any) -> dict[tuple[tuple[str, Any], ...], Any]:
    return {tuple(sorted(point.attributes.items())): point for point in metric.data.data_points}


def test_metrics_are_those_of_the_table_with_attributes_of_our_own(cache: Cache) -> None:
    reader = InMemoryMetricReader()
    made = CacheMetrics(
        cache, provider=MeterProvider([reader]), attributes={"model": "m"}, explain_every=1
    )
    serve(cache, 0, 100)
    serve(cache, 0, 100)
    found = collected(reader)
    table = {metric.name: metric for metric in METRICS}
    assert found.keys() < table.keys()
    assert {metric.name for metric in METRICS} - found.keys() == {
        *(name for name in table if name.startswith(ABSENT)),
        *("kvgraft.stores", "kvgraft.touches", "kvgraft.load_back_duration"),
    }
    for name, metric in found.items():
        assert (metric.unit, metric.description) == (table[name].unit, table[name].text)
    tokens = points(found["kvgraft.tokens"])
    device = (("kvgraft.tier", "device"), ("model", "m"))
    assert tokens[device].value == 96
    assert found["kvgraft.tokens"].data.is_monotonic
    assert not found["kvgraft.slots"].data.is_monotonic
    (match,) = points(found["kvgraft.match_duration"]).values()
    assert isinstance(match, HistogramDataPoint)
    assert match.count == 2
    assert tuple(match.explicit_bounds) == MATCH.bounds
    reused = (("kvgraft.outcome", "reused"), ("model", "m"))
    assert points(found["kvgraft.explained_tokens"])[reused].value == 96
    made.close()
    serve(cache, 0, 100)
    found = collected(reader)
    assert "kvgraft.tokens" not in found
    assert points(found["kvgraft.match_duration"])[("model", "m"),].count == 2


class Exported:
    """Spans of a cache, as its exporter gets them."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]


@pytest.fixture(name="exported")
def made_exported() -> Exported:
    return Exported()


def test_a_request_is_a_span_with_its_waits_inside(cache: Cache, exported: Exported) -> None:
    serve(cache, 0, 100)
    cache.evict("full", 12)
    RequestSpans(cache, provider=exported.provider, attributes={"model": "m"})
    tracer = exported.provider.get_tracer("engine")
    key = TokenKey(range(100))
    with tracer.start_as_current_span("engine"):
        request = cache.begin(key, reserve=4)
    assert cache.admit(request).admitted
    cache.load_back(request)
    cache.drain()
    chunk = cache.next_chunk(request)
    assert cache.allocate(request, chunk)
    cache.computed(request, chunk)
    key.extend([1, 2, 3])
    cache.finish(request)
    (engine,), (whole,) = exported.named("engine"), exported.named("kvgraft.request")
    (admission,) = exported.named("kvgraft.admission")
    (load_back,) = exported.named("kvgraft.load_back")
    assert whole.parent == engine.get_span_context()
    assert whole.attributes == {
        "model": "m",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.cache_read.input_tokens": 96,
        "gen_ai.usage.output_tokens": 3,
        "kvgraft.device_tokens": 0,
        "kvgraft.host_tokens": 96,
        "kvgraft.storage_tokens": 0,
        "kvgraft.outcome": "finished",
    }
    for inner in (admission, load_back):
        assert inner.parent == whole.get_span_context()
        assert inner.start_time is not None
        assert inner.end_time is not None
        assert whole.start_time is not None
        assert whole.end_time is not None
        assert whole.start_time <= inner.start_time <= inner.end_time <= whole.end_time
    assert [event.name for event in whole.events] == ["matched"]


def test_a_request_that_does_not_fit_says_which_pool_is_short(
    cache: Cache, exported: Exported
) -> None:
    holder = cache.begin(TokenKey(range(100)))
    assert cache.admit(holder).admitted
    sampled = trace.SpanContext(7, 9, is_remote=True, trace_flags=trace.TraceFlags(1))
    root = trace.set_span_in_context(trace.NonRecordingSpan(sampled))
    asked: list[TokenKey] = []

    def parent_of(key: TokenKey) -> Context:
        asked.append(key)
        return root

    RequestSpans(cache, provider=exported.provider, parent_of=parent_of)
    key = TokenKey(range(500, 600))
    request = cache.begin(key)
    assert not cache.admit(request).admitted
    cache.abort(request)
    (admission,), (whole,) = exported.named("kvgraft.admission"), exported.named("kvgraft.request")
    (event,) = admission.events
    assert event.name == "deferred"
    assert event.attributes == {
        "kvgraft.component": "full",
        "kvgraft.pool": "device",
        "kvgraft.needed_slots": 14,
        "kvgraft.available_slots": 2,
    }
    assert whole.attributes is not None
    assert whole.attributes["kvgraft.outcome"] == "not admitted"
    assert whole.parent is not None
    assert (whole.parent, asked) == (sampled, [key])


def test_a_restarted_request_is_one_span_with_two_admissions(
    cache: Cache, exported: Exported
) -> None:
    spans = RequestSpans(cache, provider=exported.provider)
    request = cache.begin(TokenKey(range(50)))
    assert cache.admit(request).admitted
    cache.restart(request)
    assert cache.admit(request).admitted
    cache.abort(request)
    assert len(exported.named("kvgraft.admission")) == 2
    (whole,) = exported.named("kvgraft.request")
    assert whole.attributes is not None
    assert whole.attributes["kvgraft.outcome"] == "aborted"
    open_request = cache.begin(TokenKey(range(50)))
    spans.close()
    cache.abort(open_request)
    assert len(exported.named("kvgraft.request")) == 2
    cache.abort(cache.begin(TokenKey(range(50))))
    assert len(exported.named("kvgraft.request")) == 2


def test_a_prefetch_is_a_span_that_its_request_links_to(exported: Exported) -> None:
    with tempfile.TemporaryDirectory() as directory:
        storage = {"url": f"file:{directory}", "model": "m", "weights": "w"}
        with Cache.open(
            {"full": {}}, page_size=8, device_tokens=128, host_tokens=128, storage=storage
        ) as cache:
            RequestSpans(cache, provider=exported.provider)
            assert cache.storage
            key = TokenKey(range(100))
            prefetch = cache.storage.prefetch(key)
            assert cache.drain()
            cache.abort(cache.begin(key, prefetch=prefetch))
    (fetched,), (whole,) = exported.named("kvgraft.prefetch"), exported.named("kvgraft.request")
    assert fetched.attributes == {
        "kvgraft.gained_tokens": 0,
        "kvgraft.reason": prefetch.reason,
    }
    assert [link.context for link in whole.links] == [fetched.get_span_context()]


def test_names_of_the_conventions_are_spelt_as_they_are_there() -> None:
    named = {name: value for name, value in vars(otel).items() if name.endswith("_TOKENS")}
    assert named.keys() == {"INPUT_TOKENS", "CACHE_READ_INPUT_TOKENS", "OUTPUT_TOKENS"}
    there = {name: getattr(gen_ai_attributes, f"GEN_AI_USAGE_{name}", None) for name in named}
    if there["CACHE_READ_INPUT_TOKENS"] is None:  # it is younger than the oldest SDK
        del there["CACHE_READ_INPUT_TOKENS"], named["CACHE_READ_INPUT_TOKENS"]
    assert named == there


def test_without_an_sdk_nothing_is_made_and_nothing_of_it_is_imported() -> None:
    code = (
        "import sys\n"
        "from kvgraft import Cache, TokenKey\n"
        "from kvgraft_observe.otel import CacheMetrics, RequestSpans\n"
        "with Cache.open(['full'], device_tokens=4096) as cache:\n"
        "    CacheMetrics(cache), RequestSpans(cache)\n"
        "    cache.abort(cache.begin(TokenKey(range(100))))\n"
        "found = [name for name in sys.modules if name.startswith('opentelemetry.sdk')]\n"
        "assert not found, found\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
