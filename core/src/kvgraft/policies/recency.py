"""Eviction candidates in least-recently-used order, and the policy `lru`.

One heap over everything would cost O(log candidates) cache misses a victim: at a million nodes ten
times the cost at a thousand. So candidates lie sorted in chunks: nearly all are entered at the end,
taken from the front, and withdrawn after a binary search.

An entry is a stamp and a node. A tuple for each would be one more object that the garbage collector
visits, so a chunk is a list of stamps and a list of nodes.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from gc import is_tracked
from typing import Any, Final

from kvgraft.compiled import mypyc_attr
from kvgraft.policies.policy import Hint, Pool, Use

MOST_IN_CHUNK: Final = 256
"""Entries; a fuller chunk is cut in two."""


_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes = [ctypes.py_object]
_untrack.restype = None


def untrack(objects: tuple[object, ...]) -> None:
    """Remove objects from the garbage collector's list; about 0.15 µs each."""
    any(map(_untrack, filter(is_tracked, objects)))  # no Python loop: `_untrack` returns None


@mypyc_attr(allow_interpreted_subclasses=True)
class RecencyQueue:
    """Pairs of stamp and node, smallest stamp first; equal stamps in the order of nodes.

    Each call is a binary search among the chunks and in one, and moves one chunk's entries.
    """

    __slots__ = ("_firsts", "_nodes", "_stamps")

    def __init__(self) -> None:
        self._stamps: list[list[int]] = []
        """By chunk, in order."""
        self._nodes: list[list[Any]] = []
        self._firsts: list[int] = []
        """The first stamp of each chunk."""

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate."""
        firsts, chunk = self._firsts, -1
        if not firsts:
            self._add(0, [stamp], [node])
            return
        stamps = self._stamps[-1]
        if stamp > stamps[-1]:
            stamps.append(stamp)
            self._nodes[-1].append(node)
        else:
            chunk = max(0, bisect_right(firsts, stamp) - 1)
            while chunk and firsts[chunk] == stamp and node < self._nodes[chunk][0]:
                chunk -= 1
            stamps, nodes = self._stamps[chunk], self._nodes[chunk]
            at = bisect_right(stamps, stamp)
            while at and stamps[at - 1] == stamp and node < nodes[at - 1]:
                at -= 1
            stamps.insert(at, stamp)
            nodes.insert(at, node)
            firsts[chunk] = stamps[0]
        if len(stamps) > MOST_IN_CHUNK:
            self._cut(chunk % len(firsts))

    def pop(self) -> tuple[int, Any] | None:
        """Take the oldest candidate; None if there is none."""
        entry = self.entry(0, 0)
        if entry is not None:
            self._remove(0, 0)
        return entry

    def withdraw(self, stamp: int, node: Any) -> None:
        """Drop a candidate that was entered with that stamp.

        Raises:
            LookupError: it is not there.
        """
        if not self.drop(stamp, node):
            raise LookupError(f"{node!r} is not entered with stamp {stamp}")

    def drop(self, stamp: int, node: Any) -> bool:
        """Drop a candidate; false if it is not there."""
        chunk = bisect_right(self._firsts, stamp) - 1
        while chunk >= 0:
            stamps, nodes = self._stamps[chunk], self._nodes[chunk]
            at = bisect_left(stamps, stamp)
            while at < len(stamps) and stamps[at] == stamp:
                if nodes[at] == node:
                    self._remove(chunk, at)
                    return True
                at += 1
            if stamps[0] < stamp:
                break
            chunk -= 1
        return False

    def first(self, above: int, until: int) -> tuple[int, Any] | None:
        """The oldest candidate of those with a stamp above one, and not above another one."""
        entry = self.entry(*self._place(above))
        return entry if entry is not None and entry[0] <= until else None

    def take_first(self, above: int, until: int) -> tuple[int, Any] | None:
        """Take `first`."""
        chunk, at = self._place(above)
        if chunk == len(self._stamps) or (stamp := self._stamps[chunk][at]) > until:
            return None
        node = self._nodes[chunk][at]
        self._remove(chunk, at)
        return stamp, node

    def entry(self, chunk: int, at: int) -> tuple[int, Any] | None:
        """The candidate at a place of a chunk; None if there is none."""
        if chunk >= len(self._stamps) or at >= len(self._stamps[chunk]):
            return None
        return self._stamps[chunk][at], self._nodes[chunk][at]

    def score(self, stamp: int) -> float | None:
        """None: stamps alone decide."""
        del stamp
        return None

    def __len__(self) -> int:
        return sum(map(len, self._stamps))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every entry, in order."""
        for stamps, nodes in zip(self._stamps, self._nodes):
            yield from zip(stamps, nodes)

    # -- inside

    def _place(self, above: int) -> tuple[int, int]:
        """Chunk, and place in it, of the first entry with a stamp above one."""
        firsts = self._firsts
        if not firsts or above < firsts[0]:
            return 0, 0
        chunk = bisect_right(firsts, above) - 1
        at = bisect_right(self._stamps[chunk], above)
        return (chunk, at) if at < len(self._stamps[chunk]) else (chunk + 1, 0)

    def _remove(self, chunk: int, at: int) -> None:
        stamps = self._stamps[chunk]
        if len(stamps) == 1:
            del self._stamps[chunk], self._nodes[chunk], self._firsts[chunk]
            return
        del stamps[at], self._nodes[chunk][at]
        if not at:
            self._firsts[chunk] = stamps[0]

    def _add(self, chunk: int, stamps: list[int], nodes: list[Any]) -> None:
        """Add a chunk; the collector visits neither list."""
        untrack((stamps, nodes))
        self._stamps.insert(chunk, stamps)
        self._nodes.insert(chunk, nodes)
        self._firsts.insert(chunk, stamps[0])

    def _cut(self, chunk: int) -> None:
        """Cut a chunk in two; the last one near its end, where nearly all enter."""
        stamps, nodes = self._stamps[chunk], self._nodes[chunk]
        at = len(stamps) // 2 if chunk + 1 < len(self._firsts) else len(stamps) - 1
        self._add(chunk + 1, stamps[at:], nodes[at:])
        del stamps[at:], nodes[at:]


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastRecentlyUsed:
    """Least recently used first; all requests are of one class."""

    name = "lru"
    classifies = False

    def order(self, pool: Pool) -> RecencyQueue:
        """A queue by stamps."""
        del pool
        return RecencyQueue()

    def opened(self, base_tokens: int) -> None:
        """Does nothing: no size matters."""

    def classify(self, use: Use) -> tuple[int, Any]:
        """One class for all."""
        del use
        return 0, None

    def admitted(self, use: Use, stamp: int) -> None:
        """Notes nothing."""

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        """One class for all."""
        del use, stamp, hint
        return 0

    def describe(self, use_class: int) -> str:
        """Empty: there is one class."""
        del use_class
        return ""
