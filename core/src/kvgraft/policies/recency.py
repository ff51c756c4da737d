"""Eviction candidates in least-recently-used order.

One heap over everything would cost O(log candidates) cache misses a victim: at a million nodes ten
times the cost at a thousand. Stamps come from a counter, so they are dense, and a candidate is
nearly always younger than the one that leaves next. So candidates wait unordered in spans of
consecutive stamps, and only the oldest span is a heap.

An entry is a stamp and a node. Those that wait lie one behind the other in one list: a tuple for
each would be one more object that the garbage collector visits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from gc import is_tracked
from heapq import heapify, heappop, heappush
from typing import Any, Final

from kvgraft.compiled import mypyc_attr
from kvgraft.policies.policy import CLASS_BITS

SPAN_BITS: Final = CLASS_BITS + 6
"""Stamps per span as a power of two: enough to share a list, few enough to order quickly."""

LEFT_BEHIND: Final = 1 << 62
"""Taken off the stamp of data that a running request left behind (I9). Such stamps are negative:
they come before all others, and the oldest first among themselves.
"""

FIRST_USE: Final = 0
"""Stamps of data that was left behind, and that nobody has used since, are below this."""


_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes = [ctypes.py_object]
_untrack.restype = None


def untrack(objects: tuple[object, ...]) -> None:
    """Take objects off the collector's list, as far as they are on it; about 0.15 µs each."""
    for each in objects:
        if is_tracked(each):
            _untrack(each)


def paired(entries: list[Any]) -> Iterator[tuple[int, Any]]:
    """Stamps and nodes that lie one behind the other, in pairs."""
    each = iter(entries)
    return zip(each, each)


@mypyc_attr(allow_interpreted_subclasses=True)
class RecencyQueue:
    """Pairs of stamp and node, smallest stamp first; equal stamps in the order of nodes.

    `push` is O(1) for a stamp younger than the oldest span, `pop` O(log span) amortised; a stamp
    that belongs to the oldest span or before costs O(log of that span).
    """

    __slots__ = ("_oldest", "_order", "_reached", "_spans")

    def __init__(self) -> None:
        self._oldest: list[tuple[int, Any]] = []
        """A heap of every entry whose span is `_reached` or before."""
        self._reached = -LEFT_BEHIND
        self._spans: dict[int, list[Any]] = {}
        """Entries, one behind the other."""
        self._order: list[int] = []
        """A heap of the keys of `_spans`."""

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate."""
        span = stamp >> SPAN_BITS
        if span <= self._reached:
            heappush(self._oldest, (stamp, node))
            return
        entries = self._spans.get(span)
        if entries is None:
            self._spans[span] = [stamp, node]
            heappush(self._order, span)
        else:
            entries.append(stamp)
            entries.append(node)

    def pop(self) -> tuple[int, Any] | None:
        """Take the oldest candidate; None if there is none."""
        if not self._oldest and not self._reach():
            return None
        return heappop(self._oldest)

    def _reach(self) -> bool:
        """Order the next span; false if there is none."""
        if not self._order:
            return False
        self._reached = heappop(self._order)
        self._oldest = list(paired(self._spans.pop(self._reached)))
        heapify(self._oldest)
        return True

    def score(self, stamp: int) -> float | None:
        """None: stamps alone decide."""
        del stamp
        return None

    def keep(self, wanted: Callable[[Any], object]) -> None:
        """Drop every candidate whose node is not wanted; O(candidates)."""
        self._oldest = [entry for entry in self._oldest if wanted(entry[1])]
        heapify(self._oldest)
        for span, each in list(self._spans.items()):
            self._spans[span] = [part for one in paired(each) if wanted(one[1]) for part in one]
        self._spans = {span: entries for span, entries in self._spans.items() if entries}
        self._order = list(self._spans)
        heapify(self._order)

    def __len__(self) -> int:
        return len(self._oldest) + sum(map(len, self._spans.values())) // 2

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every entry, in no order."""
        yield from self._oldest
        for entries in self._spans.values():
            yield from paired(entries)
