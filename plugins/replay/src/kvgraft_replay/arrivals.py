"""When requests arrive: at the trace's times, or when users continue."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from kvgraft_replay.workload import TraceRequest

__all__ = ["Arrivals", "ClosedLoop", "OpenLoop"]


class Arrivals(Protocol):
    """A source of requests on the virtual clock."""

    def next_s(self) -> float | None:
        """When the next request known so far arrives; None if none is known."""

    def take(self, now_s: float) -> list[TraceRequest]:
        """Requests that have arrived by `now_s`."""

    def ended(self, request: TraceRequest, now_s: float) -> None:
        """A request ended, served or not; its session may continue."""


class OpenLoop:
    """Requests arrive at the trace's times, independent of the cache."""

    def __init__(self, requests: list[TraceRequest]) -> None:
        self._left = deque(sorted(requests, key=lambda each: (each.arrival_s, each.index)))

    def next_s(self) -> float | None:
        """See `Arrivals`."""
        return self._left[0].arrival_s if self._left else None

    def take(self, now_s: float) -> list[TraceRequest]:
        """See `Arrivals`."""
        arrived = []
        while self._left and self._left[0].arrival_s <= now_s:
            arrived.append(self._left.popleft())
        return arrived

    def ended(self, request: TraceRequest, now_s: float) -> None:
        """Do nothing: in an open loop arrivals do not depend on answers."""


class ClosedLoop:
    """A number of users; each plays sessions in turn and sends a request after each answer."""

    def __init__(self, sessions: Sequence[Sequence[TraceRequest]], users: int) -> None:
        self._sessions = deque(deque(session) for session in sessions)
        self._current: dict[int, deque[TraceRequest]] = {}
        self._due: list[tuple[float, int, TraceRequest]] = []
        for _ in range(min(users, len(sessions))):
            self._start(0.0)

    def _start(self, now_s: float) -> None:
        if self._sessions:
            session = self._sessions.popleft()
            self._current[session[0].session] = session
            self._next(session, now_s)

    def _next(self, session: deque[TraceRequest], now_s: float) -> None:
        request = session.popleft()
        heapq.heappush(self._due, (now_s + request.think_s, request.index, request))

    def next_s(self) -> float | None:
        """See `Arrivals`."""
        return self._due[0][0] if self._due else None

    def take(self, now_s: float) -> list[TraceRequest]:
        """See `Arrivals`."""
        arrived = []
        while self._due and self._due[0][0] <= now_s:
            arrived.append(heapq.heappop(self._due)[2])
        return arrived

    def ended(self, request: TraceRequest, now_s: float) -> None:
        """Schedule the session's next request, or the user's next session."""
        session = self._current[request.session]
        if session:
            self._next(session, now_s)
        else:
            del self._current[request.session]
            self._start(now_s)
