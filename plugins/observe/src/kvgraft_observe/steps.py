"""Durations of requests' steps, and reasons why prefixes were not longer.

A tracer of the cache measures them for both exporters, so these count the same things.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from kvgraft import Cache, Decision, Prefetch, Request, TokenKey
from kvgraft_observe.arguments import expect_cache, expect_count
from kvgraft_observe.metrics import ADMISSION_WAIT, LOAD_BACK, MATCH, PREFETCH, Metric
from kvgraft_observe.tracing import Tracer

__all__ = ["EXPLAIN_EVERY", "Outcome", "Sink", "Steps", "expect_steps", "outcomes"]

EXPLAIN_EVERY = 16
"""By default one in so many admitted requests is explained."""


class Outcome(NamedTuple):
    """Tokens of a prompt with the same outcome.

    Attributes:
        outcome: `reused`, or the reason: `unknown`, the tree has no data for them; `incomplete`, a
            component lacks data that it needs to resume deeper, or shortened the match itself;
            `crowded`, pinning them would have taken promised slots; `recompute`, loading them was
            estimated slower; `no_copy`, a component cannot copy its state.
        component: the component that lacks data; empty otherwise.
        tokens: how many.
    """

    outcome: str
    component: str
    tokens: int


class Sink(Protocol):
    """Receives measurements, on the cache's thread."""

    def record(self, metric: Metric, seconds: float, *labels: str) -> None:
        """A duration."""

    def count(self, outcome: Outcome) -> None:
        """Tokens of an explained prompt."""


class _Wait(NamedTuple):
    """A prompt that waits for admission: since when, and its length."""

    since: float
    n_tokens: int


class Steps(Tracer):
    """Measures the steps of one cache's requests.

    The wait for admission begins when the prompt is first matched. A request that is aborted and
    begun again with the same key, not longer than before, continues its wait. A load-back or
    prefetch ends with the poll that finds it ready, since that is when the engine can know.

    Args:
        cache: the cache; this is added to its tracers.
        sink: takes the measurements.
        explain_every: explain one in so many admitted requests; 0 for none. An explanation takes
            the cache's thread about 60 µs for a prompt of 128K tokens in 30 nodes, and some ms if a
            component lacks data at every boundary.
        clock: monotonic, in seconds.

    Raises:
        ConfigError: no cache, or a negative number.
    """

    def __init__(
        self,
        cache: Cache,
        sink: Sink,
        explain_every: int = EXPLAIN_EVERY,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        expect_steps("Steps", cache, explain_every)
        self.cache = cache
        self._sink = sink
        self._every = explain_every
        self._clock = clock
        self._admitted = 0
        self._since = 0.0
        self._waiting: WeakKeyDictionary[TokenKey, _Wait] = WeakKeyDictionary()
        self._loading: dict[Request, float] = {}
        self._fetching: dict[Prefetch, float] = {}
        cache.add_tracer(self)

    def close(self) -> None:
        """Stop measuring."""
        self.cache.remove_tracer(self)

    # -- called by the cache

    def beginning(self, key: TokenKey) -> None:
        self._since = self._clock()
        wait = self._waiting.get(key)
        if wait is None or wait.n_tokens != key.n_tokens:
            self._waiting[key] = _Wait(self._since, key.n_tokens)

    def begun(self, request: Request) -> None:
        self._sink.record(MATCH, self._clock() - self._since)

    def decided(self, request: Request, decision: Decision) -> None:
        if not decision.admitted:
            return
        wait = self._waiting.pop(request.key, None)
        if wait is not None:
            self._sink.record(ADMISSION_WAIT, self._clock() - wait.since)
        if self._every and not request.continues:
            if self._admitted % self._every == 0:
                for outcome in outcomes(self.cache, request):
                    self._sink.count(outcome)
            self._admitted += 1

    def loading(self, request: Request) -> None:
        self._loading[request] = self._clock()

    def finished(self, request: Request) -> None:
        self._loading.pop(request, None)

    def aborted(self, request: Request) -> None:
        self._loading.pop(request, None)

    def prefetching(self, prefetch: Prefetch) -> None:
        self._fetching[prefetch] = self._clock()

    def polled(self) -> None:
        if not self._loading and not self._fetching:
            return
        now = self._clock()
        for request in [each for each in self._loading if each.ready]:
            since = self._loading.pop(request)
            if not request.load_failed:
                self._sink.record(LOAD_BACK, now - since)
        for prefetch in [each for each in self._fetching if each.ended]:
            since = self._fetching.pop(prefetch)
            result = "delivered" if prefetch.gained_tokens else "in vain"
            self._sink.record(PREFETCH, now - since, result)


def expect_steps(subject: str, cache: object, explain_every: object) -> None:
    """Refuse wrong arguments before anything is made.

    Raises:
        ConfigError: no cache, or a negative number.
    """
    expect_cache(subject, cache)
    expect_count(f"{subject}: explain_every", explain_every, 0, zero="0 for never")


def outcomes(cache: Cache, request: Request) -> Iterator[Outcome]:
    """The tokens that a request could have reused, by outcome.

    Args:
        cache: the request's.
        request: a request that was just admitted.
    """
    found = cache.explain(request.key)
    anchor = min(request.anchor_tokens, found.limit)
    known = max(found.known, anchor)
    if anchor:
        yield Outcome("reused", "", anchor)
    if found.limit > known:
        yield Outcome("unknown", "", found.limit - known)
    if known > anchor:
        if request.limited is not None:
            yield Outcome(request.limited.name.lower(), "", known - anchor)
        else:
            least = min(found.components, key=lambda each: each.accepts)
            lacking = least.component if least.accepts < known else ""
            yield Outcome("incomplete", lacking, known - anchor)
