"""Memory that a backend has registered, and whether a payload lies in it."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from kvgraft_storage.memory import address_of

__all__ = ["Registered"]


class Registered:
    """Ranges of memory; thread-safe."""

    def __init__(self) -> None:
        self._ranges: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, memory: memoryview) -> None:
        """Payloads in this memory need no copy from now on."""
        start = address_of(memory)
        with self._lock:
            self._ranges[start] = max(start + len(memory), self._ranges.get(start, 0))

    def remove(self, memory: memoryview) -> None:
        """Undo `add`."""
        with self._lock:
            self._ranges.pop(address_of(memory), None)

    def holds(self, parts: Iterable[memoryview]) -> bool:
        """Whether every part lies in one of the ranges."""
        with self._lock:
            ranges = list(self._ranges.items())
        return bool(ranges) and all(_is_within(part, ranges) for part in parts)


def _is_within(part: memoryview, ranges: Iterable[tuple[int, int]]) -> bool:
    first = address_of(part)
    return any(start <= first and first + len(part) <= end for start, end in ranges)
