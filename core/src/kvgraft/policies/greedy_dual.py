"""Eviction candidates by what losing them costs, and by age (GreedyDual; Young, 1994).

States, and the windows at resume points, take equal room and save unequal work: the only one behind
a long document saves all of it, one of two close together saves the few tokens between them. By
recency alone a pool that is short of them loses both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from kvgraft.policies.recency import kept, paired
from kvgraft.untracked import untrack

__all__ = ["GreedyDualQueue"]


class GreedyDualQueue:
    """Pairs of stamp and node, lowest rank first; equal ranks by stamp, then in the order of nodes.

    A candidate's rank is its cost on top of the rank of the last victim before it was entered. So
    what costs least leaves first, and what is used no more leaves in the end, whatever its cost.
    A cost may rise while a candidate waits, as others leave; it counts then. One that falls counts
    when the candidate is entered again.

    Args:
        cost: what losing a node costs, 0 or more; asked when victims are taken, not at `push`.
    """

    __slots__ = ("_cost", "_entered", "_floor", "_ranked")

    def __init__(self, cost: Callable[[Any], int]) -> None:
        self._cost = cost
        self._floor = 0
        """Rank of the last victim."""
        self._entered: list[Any] = []
        """Stamps and nodes entered since then; so the floor is still that of their entry."""
        self._ranked: list[Any] = []
        """A heap of rank, stamp, node, and floor when it was entered. Compiled code would make a
        typed tuple anew wherever one is used, and the collector would visit that one."""

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate; O(1)."""
        self._entered += (stamp, node)

    def pop(self) -> tuple[int, Any] | None:
        """Take the candidate of the lowest rank; None if there is none."""
        ranked, cost = self._ranked, self._cost
        for stamp, node in paired(self._entered):
            entry: Any = (self._floor + cost(node), stamp, node, self._floor)
            untrack((entry,))
            heappush(ranked, entry)
        self._entered.clear()
        while ranked:
            rank, stamp, node, floor = ranked[0]
            now = floor + cost(node)
            if now > rank:
                entry = (now, stamp, node, floor)
                untrack((entry,))
                heapreplace(ranked, entry)
                continue
            heappop(ranked)
            self._floor = max(self._floor, now)
            return stamp, node
        return None

    def score(self, stamp: int) -> float | None:
        """None: a stamp says nothing of the cost."""
        del stamp
        return None

    def keep(self, wanted: Callable[[Any], object]) -> None:
        """Drop every candidate whose node is not wanted; O(candidates)."""
        self._entered = kept(self._entered, wanted)
        self._ranked = [entry for entry in self._ranked if wanted(entry[2])]
        heapify(self._ranked)

    def __len__(self) -> int:
        return len(self._entered) // 2 + len(self._ranked)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every entry, in no order."""
        yield from paired(self._entered)
        for _, stamp, node, _ in self._ranked:
            yield stamp, node
