"""The events that one reader has not taken yet (V3)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvgraft_observe.events.kinds import Cleared, Event

__all__ = ["EventStream", "Observe"]

logger = logging.getLogger("kvgraft")

Observe = Callable[[list[Event]], object]

LONGEST_REST = 1024
"""Most polls for which an observer that keeps failing is skipped."""


class EventStream:
    """Events for one reader, in the order of the changes, each once.

    It begins with `Cleared` and a snapshot. It begins again after a loss: more than `limit` events
    waited for the reader, or its observer raised. The cache's thread calls it, as it calls the
    cache; the events may be read on any thread.

    Attributes:
        limit: most events that wait.
        lost: events that were dropped so far.
        failures: how often its observer raised.
    """

    def __init__(
        self,
        limit: int,
        observer: Observe | None,
        snapshot: Callable[[], Iterable[Event]],
        close: Callable[[EventStream], None],
    ) -> None:
        self.limit = limit
        self.lost = 0
        self.failures = 0
        self._observer = observer
        self._snapshot = snapshot
        self._close = close
        self._events: list[Event] = []
        self._begins, self._behind = True, False
        self._asked_to_begin = False
        self._rest = self._next_rest = 0
        self._closed = False

    def __repr__(self) -> str:
        return f"<EventStream: {len(self._events)} of {self.limit} events, {self.lost} lost>"

    def __len__(self) -> int:
        """Events that wait; 0 before the stream begins, or begins again."""
        return len(self._events)

    def add(self, event: Event) -> None:
        """Keep an event; if too many wait, all are dropped, and the stream begins again."""
        if self._begins:
            self.lost += self._behind
        elif len(self._events) < self.limit:
            self._events.append(event)
        else:
            self._start_again(len(self._events) + 1)

    def clear(self) -> None:
        """The cache dropped everything that the reader was notified of."""
        self.add(Cleared(self.lost))

    def take(self) -> list[Event]:
        """Take all events that wait; the first is `Cleared` where the stream begins (again)."""
        if self._closed:
            return []
        if self._asked_to_begin:
            self._asked_to_begin = False
            self._start_again(len(self._events))
        if self._begins:
            self._begins = self._behind = False
            return [Cleared(self.lost), *self._snapshot()]
        taken, self._events = self._events, []
        return taken

    def deliver(self) -> None:
        """Give the observer its events; after an exception it is skipped for some calls."""
        if self._observer is None:
            return
        if self._rest:
            self._rest -= 1
            return
        events = self.take()
        if not events:
            return
        try:
            self._observer(events)
        except Exception as error:  # noqa: BLE001 - it costs the cache nothing (V3)
            self.failures += 1
            self._start_again(len(events))
            self._rest = self._next_rest = min(2 * self._next_rest + 1, LONGEST_REST)
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
            logger.warning("an observer of events raised and begins again later: %s", said)
        else:
            self._next_rest = 0

    def begin_again(self) -> None:
        """Begin again with the next events that are taken or delivered; any thread may ask.

        For a reader whose own readers missed events. Waiting events count as lost; the snapshot
        covers them.
        """
        self._asked_to_begin = True

    def close(self) -> None:
        """End the stream; what waits is dropped. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._events.clear()
            self._close(self)

    def _start_again(self, lost: int) -> None:
        self.lost += lost
        self._events.clear()
        self._begins = self._behind = True
