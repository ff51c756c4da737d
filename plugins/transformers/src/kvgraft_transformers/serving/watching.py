"""Keeps recent requests with their hits and explanations, while a client reads them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvgraft import Cache, Decision, Request
from kvgraft_observe.tracing import Tracer

__all__ = ["HitLog", "explanation_as_json"]

MOST_HITS = 50
"""Most requests that are kept."""

WATCHED_S = 10.0
"""Seconds for which requests are recorded after a read."""


class HitLog(Tracer):
    """Records each admitted request with the reasons why its prefix is not longer.

    Explanations cost more than the match itself, so requests are recorded only for some seconds
    after `look`. The cache's thread calls all methods.

    Args:
        cache: the cache to trace.
        clock: monotonic, in seconds.
    """

    def __init__(self, cache: Cache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._until: float | None = None
        self._hits: deque[dict[str, Any]] = deque(maxlen=MOST_HITS)
        self._open: dict[Request, dict[str, Any]] = {}
        self._seen = 0

    def look(self) -> list[dict[str, Any]]:
        """The recorded requests, latest first; keeps recording for a while."""
        if self._until is None:
            self._cache.add_tracer(self)
        self._until = self._clock() + WATCHED_S
        return list(reversed(self._hits))

    def decided(self, request: Request, decision: Decision) -> None:
        """As in `Tracer`: record the request if it was admitted."""
        if not decision.admitted:
            return
        self._forget(request)  # admitted again, after a failed copy
        self._seen += 1
        why = self._cache.explain(request.key)
        hit = {
            "number": self._seen,
            "prompt": request.prompt,
            "resumed": request.anchor_tokens,
            "device": request.device_tokens,
            "host": request.anchor_tokens - request.device_tokens - request.storage_tokens,
            "storage": request.storage_tokens,
            "components": explanation_as_json(why)["components"],
        }
        self._hits.append(hit)
        self._open[request] = hit

    def finished(self, request: Request) -> None:
        """As in `Tracer`."""
        self._open.pop(request, None)

    def aborted(self, request: Request) -> None:
        """As in `Tracer`: a request that never ran, such as a probe of admission, is not kept."""
        if request.computed == request.anchor_tokens:
            self._forget(request)
        self._open.pop(request, None)

    def polled(self) -> None:
        """As in `Tracer`: stop if no client has read for long."""
        if self._until is not None and self._clock() > self._until:
            self._until = None
            self._open.clear()
            self._cache.remove_tracer(self)

    def _forget(self, request: Request) -> None:
        hit = self._open.pop(request, None)
        if hit is not None and hit in self._hits:
            self._hits.remove(hit)


def explanation_as_json(why: Any) -> dict[str, Any]:
    """An `Explanation` as JSON; lengths in tokens."""
    return {
        "tokens": why.tokens,
        "limit": why.limit,
        "known": why.known,
        "anchor": why.anchor,
        "device_anchor": why.device_anchor,
        "components": [each._asdict() for each in why.components],
        "points": [{"position": at, "kind": kind.value} for at, kind in why.points],
        "skipped": [each._asdict() for each in why.skipped],
        "lost": {kind.value: n_points for kind, n_points in why.lost},
        "policy": why.policy,
        "text": str(why),
    }
