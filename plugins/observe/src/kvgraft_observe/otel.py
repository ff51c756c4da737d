"""Metrics and spans of a cache for OpenTelemetry, through its API alone.

The application's SDK exports them; without an SDK they are dropped. Names and attributes begin with
`kvgraft`, except for token counts that the conventions for generative AI name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, TracerProvider

from kvgraft import Cache, Decision, Prefetch, Request, TokenKey, __version__
from kvgraft_observe.arguments import (
    expect_attributes,
    expect_cache,
    expect_callable,
    expect_type,
)
from kvgraft_observe.metrics import EXPLAINED, METRICS, Kind, Metric, Read
from kvgraft_observe.steps import EXPLAIN_EVERY, Outcome, Steps, expect_steps
from kvgraft_observe.tracing import Tracer

__all__ = [
    "CACHE_READ_INPUT_TOKENS",
    "INPUT_TOKENS",
    "OUTPUT_TOKENS",
    "CacheMetrics",
    "RequestSpans",
]

SCOPE = "kvgraft"
"""Name of the meter and the tracer."""

INPUT_TOKENS = "gen_ai.usage.input_tokens"
CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
"""Attributes of the conventions for generative AI; no stable package has them as constants."""

Attributes = Mapping[str, str | int | float | bool]


def _no_parent(key: TokenKey) -> Context | None:
    """The context that is current where the cache is called."""
    del key
    return None


class CacheMetrics:
    """The metrics of one cache, as instruments of a meter.

    Counts are read when metrics are collected, on the collecting thread; durations are recorded on
    the cache's, until `close`.

    Args:
        cache: the cache.
        provider: gives the meter; the global one by default.
        attributes: attributes of every sample, such as the cache's name.
        explain_every: explain one in so many admitted requests: why their prefixes were not longer;
            0 for none.

    Raises:
        ConfigError: an argument of a wrong type, or a negative number.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        provider: MeterProvider | None = None,
        attributes: Attributes | None = None,
        explain_every: int = EXPLAIN_EVERY,
    ) -> None:
        expect_steps("CacheMetrics", cache, explain_every)
        if provider is not None:
            wanted = "a MeterProvider of opentelemetry.metrics"
            expect_type("CacheMetrics: provider", provider, MeterProvider, wanted)
        self._cache = cache
        self._attributes = _attributes("CacheMetrics", attributes)
        self._closed = False
        meter = metrics.get_meter(SCOPE, __version__, provider)
        self._histograms: dict[str, Histogram] = {}
        for metric in METRICS:
            about = (metric.unit, metric.text)
            if metric.kind is Kind.HISTOGRAM:
                self._histograms[metric.name] = meter.create_histogram(
                    metric.name, *about, explicit_bucket_boundaries_advisory=metric.bounds
                )
            elif metric.read is not None:
                callback = self._callback(metric, metric.read)
                if metric.kind is Kind.COUNTER:
                    meter.create_observable_counter(metric.name, [callback], *about)
                else:
                    meter.create_observable_up_down_counter(metric.name, [callback], *about)
        self._explained = meter.create_counter(EXPLAINED.name, EXPLAINED.unit, EXPLAINED.text)
        self._steps = Steps(cache, self, explain_every)

    def close(self) -> None:
        """Stop reporting."""
        self._closed = True
        self._steps.close()

    def record(self, metric: Metric, seconds: float, *labels: str) -> None:
        """Record a duration."""
        self._histograms[metric.name].record(seconds, self._named(metric, labels))

    def count(self, outcome: Outcome) -> None:
        """Count tokens of an explained prompt."""
        labels = (outcome.outcome, outcome.component)
        self._explained.add(outcome.tokens, self._named(EXPLAINED, labels))

    def _callback(
        self, metric: Metric, read: Read
    ) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observe(options: CallbackOptions) -> Iterable[Observation]:
            del options
            if self._closed:
                return []
            return [
                Observation(value, self._named(metric, labels))
                for labels, value in read(self._cache.stats())
            ]

        return observe

    def _named(
        self, metric: Metric, labels: tuple[str, ...]
    ) -> dict[str, str | int | float | bool]:
        """The attributes of a sample; empty labels are left out."""
        named = {f"{SCOPE}.{name}": value for name, value in zip(metric.labels, labels) if value}
        return {**self._attributes, **named}


class _Life(NamedTuple):
    """The spans of a request that has not ended.

    Attributes:
        whole: from its first match to its end.
        admission: until it is admitted.
    """

    whole: Span
    admission: Span


class RequestSpans(Tracer):
    """A span for every request of a cache, with a child span for each wait.

        kvgraft.request       from the match until it is finished or aborted
          kvgraft.admission   from the match until it is admitted
          kvgraft.load_back   until its data has come from HOST
        kvgraft.prefetch      until its data has come from STORAGE; the request's span links to it

    Args:
        cache: the cache; this is added to its tracers.
        provider: gives the tracer; the global one by default.
        parent_of: returns the context of the parent span for a key; by default, and for None, the
            context that is current when the cache is called.
        attributes: attributes of every span.

    Raises:
        ConfigError: no cache, or another argument of a wrong type.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        provider: TracerProvider | None = None,
        parent_of: Callable[[TokenKey], Context | None] = _no_parent,
        attributes: Attributes | None = None,
    ) -> None:
        expect_cache("RequestSpans", cache)
        if provider is not None:
            wanted = "a TracerProvider of opentelemetry.trace"
            expect_type("RequestSpans: provider", provider, TracerProvider, wanted)
        wanted = "a function from a TokenKey to a context"
        expect_callable("RequestSpans: parent_of", parent_of, wanted)
        self._cache = cache
        self._parent_of = parent_of
        self._attributes = _attributes("RequestSpans", attributes)
        self._tracer = trace.get_tracer(SCOPE, __version__, provider)
        self._since_ns = 0
        self._lives: dict[Request, _Life] = {}
        self._loading: dict[Request, Span] = {}
        self._fetching: dict[Prefetch, Span] = {}
        self._fetched: WeakKeyDictionary[TokenKey, SpanContext] = WeakKeyDictionary()
        cache.add_tracer(self)

    def close(self) -> None:
        """End all spans and make no more."""
        self._cache.remove_tracer(self)
        for life in self._lives.values():
            _end_if_open(life.admission)
            life.whole.end()
        for span in (*self._loading.values(), *self._fetching.values()):
            span.end()
        for spans in (self._lives, self._loading, self._fetching):
            spans.clear()

    # -- called by the cache

    def beginning(self, key: TokenKey) -> None:
        self._since_ns = time.time_ns()

    def begun(self, request: Request) -> None:
        life = self._lives.get(request)
        if life is None:
            whole = self._begin(request)
        else:  # a restart
            whole = life.whole
            _end_if_open(life.admission)
            self._end_loading(request)
        found: dict[str, str | int] = {
            "kvgraft.device_tokens": request.device_tokens,
            "kvgraft.host_tokens": (
                request.anchor_tokens - request.device_tokens - request.storage_tokens
            ),
            "kvgraft.storage_tokens": request.storage_tokens,
        }
        if request.limited is not None:
            found["kvgraft.limited"] = request.limited.name.lower()
        whole.set_attribute(CACHE_READ_INPUT_TOKENS, request.anchor_tokens)
        whole.set_attributes(found)
        whole.add_event("matched", found)
        admission = self._tracer.start_span(
            "kvgraft.admission", trace.set_span_in_context(whole), attributes=self._attributes
        )
        self._lives[request] = _Life(whole, admission)

    def decided(self, request: Request, decision: Decision) -> None:
        life = self._lives.get(request)
        if life is None:
            return
        if decision.admitted:
            life.admission.end()
            return
        for each in decision.shortages:
            short: dict[str, str | int] = {
                "kvgraft.component": each.component,
                "kvgraft.pool": each.pool,
                "kvgraft.needed_slots": each.needed,
                "kvgraft.available_slots": each.available,
            }
            life.admission.add_event(decision.outcome.value, short)

    def loading(self, request: Request) -> None:
        life = self._lives.get(request)
        if life is not None:
            self._loading[request] = self._tracer.start_span(
                "kvgraft.load_back",
                trace.set_span_in_context(life.whole),
                attributes=self._attributes,
            )

    def finished(self, request: Request) -> None:
        self._end(request, "finished")

    def aborted(self, request: Request) -> None:
        self._end(request, "aborted")

    def prefetching(self, prefetch: Prefetch) -> None:
        span = self._tracer.start_span(
            "kvgraft.prefetch", self._parent_of(prefetch.key), attributes=self._attributes
        )
        self._fetching[prefetch] = span
        self._fetched[prefetch.key] = span.get_span_context()

    def polled(self) -> None:
        for request in [each for each in self._loading if each.ready]:
            self._end_loading(request)
        for prefetch in [each for each in self._fetching if each.ended]:
            span = self._fetching.pop(prefetch)
            span.set_attribute("kvgraft.gained_tokens", prefetch.gained_tokens)
            span.set_attribute("kvgraft.reason", prefetch.reason)
            span.end()

    # -- inside

    def _begin(self, request: Request) -> Span:
        fetched = self._fetched.pop(request.key, None)
        return self._tracer.start_span(
            "kvgraft.request",
            self._parent_of(request.key),
            attributes={**self._attributes, INPUT_TOKENS: request.prompt},
            links=[] if fetched is None else [Link(fetched)],
            start_time=self._since_ns,
        )

    def _end_loading(self, request: Request) -> None:
        span = self._loading.pop(request, None)
        if span is not None:
            if request.load_failed:
                span.set_status(Status(StatusCode.ERROR, "a copy from the host failed"))
            span.end()

    def _end(self, request: Request, outcome: str) -> None:
        self._end_loading(request)
        life = self._lives.pop(request, None)
        if life is None:
            return
        if life.admission.is_recording():
            outcome = "not admitted"
            life.admission.end()
        produced = max(0, request.key.n_tokens - request.prompt)
        life.whole.set_attribute("kvgraft.outcome", outcome)
        life.whole.set_attribute(OUTPUT_TOKENS, produced)
        life.whole.end()


def _attributes(subject: str, given: Attributes | None) -> dict[str, str | int | float | bool]:
    """The caller's attributes; none by default.

    Raises:
        ConfigError: they are no attributes.
    """
    if given is None:
        return {}
    expect_attributes(subject, given)
    return dict(given)


def _end_if_open(span: Span) -> None:
    if span.is_recording():
        span.end()
