"""Changes of a store's content, for engines that report their data to others.

Key by key, in the order of the changes. The log is bounded: a reader that does not take its events
loses the oldest. It gets `LOST`, and starts again from `exists`.
"""

from __future__ import annotations

import enum
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Change", "EventLog", "StoreEvent"]


class Change(str, enum.Enum):
    """A change of a key."""

    STORED = "stored"
    """It can be read."""
    EVICTED = "evicted"
    """The store dropped it to make room."""
    REMOVED = "removed"
    """It was removed: by a caller, or because its data was wrong."""
    CLEARED = "cleared"
    """Every key is gone, or another store was attached; without a key."""
    LOST = "lost"
    """Events before this one were dropped; without a key."""


class StoreEvent(NamedTuple):
    """One change.

    Attributes:
        change: its kind.
        key: the storage key, `Address.key`; empty for `CLEARED` and `LOST`.
    """

    change: Change
    key: bytes = b""


class EventLog:
    """Events that were not taken yet, oldest first; thread-safe, never blocks on a store.

    Args:
        limit: most events it holds; beyond it the oldest is dropped and counted.

    Attributes:
        n_lost: events that were dropped so far.
    """

    def __init__(self, limit: int = 65_536) -> None:
        self.n_lost = 0
        self._events: deque[StoreEvent] = deque(maxlen=max(1, limit))
        self._lost = False
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._events)

    def add(self, change: Change, keys: Iterable[bytes]) -> None:
        """Append one event a key."""
        with self._lock:
            for key in keys:
                self._append(StoreEvent(change, key))

    def clear(self) -> None:
        """Everything is gone: `CLEARED` takes the place of all events."""
        with self._lock:
            self._events.clear()
            self._lost = False
            self._append(StoreEvent(Change.CLEARED))

    def take(self, limit: int | None = None) -> list[StoreEvent]:
        """Take the oldest events out, each once; the first is `LOST` if any were dropped.

        Args:
            limit: most events to take; None for all.
        """
        with self._lock:
            taken = [StoreEvent(Change.LOST)] if self._lost else []
            self._lost = False
            n = len(self._events) if limit is None else min(limit, len(self._events))
            taken += [self._events.popleft() for _ in range(n)]
            return taken

    def _append(self, event: StoreEvent) -> None:
        if len(self._events) == self._events.maxlen:
            self.n_lost += 1
            self._lost = True
        self._events.append(event)
