"""Queues of nodes beside a pool's eviction order, first in, first out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from kvgraft.tree.node import Node

__all__ = ["Fifo"]


class Fifo:
    """Pairs of stamp and node, first in, first out.

    Attributes:
        n_slots: slots of the entries, as many as they had when they were entered.
    """

    __slots__ = ("_entries", "n_slots")

    def __init__(self) -> None:
        self._entries: deque[Any] = deque()
        """Stamp, node and slots of each, one behind the other: no object for each entry."""
        self.n_slots = 0

    def enter(self, stamp: int, node: Node, n_slots: int) -> None:
        """Enter a node behind all others."""
        self._entries += (stamp, node, n_slots)
        self.n_slots += n_slots

    @property
    def last(self) -> tuple[int, Node] | None:
        """The entry behind all others; None if there is none."""
        return (self._entries[-3], self._entries[-2]) if self._entries else None

    def pop(self) -> tuple[int, Node] | None:
        """Take the first entry; None if there is none."""
        if not self._entries:
            return None
        take = self._entries.popleft
        entry = take(), take()
        self.n_slots -= take()
        return entry

    def keep(self, wanted: Callable[[Node], object]) -> None:
        """Drop every entry whose node is not wanted; O(entries)."""
        entries = [entry for entry in self._each() if wanted(entry[1])]
        self._entries = deque([part for entry in entries for part in entry])
        self.n_slots = sum([n_slots for _, _, n_slots in entries])

    def __len__(self) -> int:
        return len(self._entries) // 3

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Every entry, the first one first."""
        for stamp, node, _ in self._each():
            yield stamp, node

    def _each(self) -> Iterator[tuple[int, Node, int]]:
        each = iter(self._entries)
        return zip(each, each, each)
