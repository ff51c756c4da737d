"""Eviction candidates in least-recently-used order.

One heap over everything would cost O(log candidates) cache misses a victim: at a million nodes ten
times the cost at a thousand. Stamps come from a counter, so they are dense, and a candidate is
nearly always younger than the one that leaves next. So candidates wait unordered in spans of
consecutive stamps, and only the oldest span is a heap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvgraft.tree.node import Node

__all__ = ["LEFT_BEHIND", "RecencyQueue"]

SPAN_BITS = 6
"""Stamps per span as a power of two: enough to share a list, few enough to order quickly."""

LEFT_BEHIND = 1 << 62
"""Taken off the stamp of data that a running request left behind (I9). Such stamps are negative:
they come before all others, and the oldest first among themselves.
"""


class RecencyQueue:
    """Pairs of stamp and node, smallest stamp first; equal stamps in the order of nodes.

    `push` is O(1) for a stamp younger than the oldest span, `pop` O(log span) amortised; a stamp
    that belongs to the oldest span or before costs O(log of that span).
    """

    __slots__ = ("_oldest", "_order", "_reached", "_spans")

    def __init__(self) -> None:
        self._oldest: list[tuple[int, Node]] = []
        """A heap of every entry whose span is `_reached` or before."""
        self._reached = -LEFT_BEHIND
        self._spans: dict[int, list[tuple[int, Node]]] = {}
        self._order: list[int] = []
        """A heap of the keys of `_spans`."""

    def push(self, stamp: int, node: Node) -> None:
        """Enter a candidate."""
        span = stamp >> SPAN_BITS
        if span <= self._reached:
            heappush(self._oldest, (stamp, node))
            return
        entries = self._spans.get(span)
        if entries is None:
            self._spans[span] = [(stamp, node)]
            heappush(self._order, span)
        else:
            entries.append((stamp, node))

    def pop(self) -> tuple[int, Node] | None:
        """Take the oldest candidate; None if there is none."""
        if not self._oldest:
            if not self._order:
                return None
            self._reached = heappop(self._order)
            self._oldest = self._spans.pop(self._reached)
            heapify(self._oldest)
        return heappop(self._oldest)

    def keep(self, wanted: Callable[[Node], object]) -> None:
        """Drop every candidate whose node is not wanted; O(candidates)."""
        kept = [entry for entry in self if wanted(entry[1])]
        self._oldest, self._reached = [], -LEFT_BEHIND
        self._spans.clear()
        self._order.clear()
        for stamp, node in kept:
            self.push(stamp, node)

    def __len__(self) -> int:
        return len(self._oldest) + sum(len(entries) for entries in self._spans.values())

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Every entry, in no order."""
        yield from self._oldest
        for entries in self._spans.values():
            yield from entries
