"""The order in which waiting requests are tried (A13)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["WaitingQueue"]

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """First come first served, with bounded overtaking.

    A request that does not fit lets smaller ones behind it run, so that it does not starve them;
    but only `patience` times, after which nobody passes until it runs, so that they do not starve
    it.

    Args:
        lookahead: how many requests are tried in one round.
        patience: rounds in which the first may be overtaken.
    """

    def __init__(self, lookahead: int = 4, patience: int = 8) -> None:
        self.lookahead = lookahead
        self.patience = patience
        self._items: deque[T] = deque()
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self._items)

    def append(self, item: T) -> None:
        """A new request, last in line."""
        self._items.append(item)

    def push_front(self, item: T) -> None:
        """A retracted request, first in line: it ran before the others."""
        self._items.appendleft(item)
        self._overtaken = 0

    def round(self) -> Iterator[T]:
        """The requests to try now, in order; call `take` for each that was admitted."""
        if self._overtaken >= self.patience:
            yield from list(self._items)[:1]
            return
        yield from list(self._items)[: self.lookahead]

    def take(self, item: T) -> None:
        """`item` was admitted or rejected: it leaves the line."""
        if self._items[0] is item:
            self._items.popleft()
            self._overtaken = 0
            return
        self._items.remove(item)
        self._overtaken += 1
