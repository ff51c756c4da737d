"""The last answers about keys, to guess presence without a call to the store."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

from kvgraft_storage.status import TRANSIENT, Status

__all__ = ["Hints"]

THERE = float("inf")


class Hints:
    """A store's last answers about the presence of keys; bounded and thread-safe.

    Args:
        limit: most keys it remembers; beyond it the oldest answer is dropped.
        absent_s: seconds for which a miss is remembered: another process may store the key.
        clock: monotonic, in seconds.
    """

    def __init__(self, limit: int, absent_s: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._absent_s = absent_s
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, verb: str, keys: Iterable[bytes], statuses: Iterable[Status]) -> None:
        """Record a call's answers about its keys."""
        absent = self._clock() + self._absent_s
        with self._lock:
            for key, status in zip(keys, statuses):
                if status in TRANSIENT or status is Status.FULL:
                    continue  # says nothing about existing data
                there = status is Status.OK and verb != "remove"
                self._until[key] = THERE if there else absent
                self._until.move_to_end(key)
            while len(self._until) > self._limit:
                self._until.popitem(last=False)

    def of(self, key: bytes) -> bool | None:
        """Whether a key was there; None if no answer is recent enough."""
        until = self._until.get(key)
        if until is None or until == THERE:
            return None if until is None else True
        return False if self._clock() < until else None

    def clear(self) -> None:
        """Drop all answers."""
        with self._lock:
            self._until.clear()
