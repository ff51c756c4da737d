"""The order in which waiting requests are tried (A13)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

from kvgraft.errors import ConfigError
from kvgraft.sizes import expect_count

__all__ = ["WaitingQueue"]

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """First come first served, with bounded overtaking.

    A request that does not fit lets smaller ones behind it run, so that it does not starve them;
    but only `patience` times. Then no request passes it until it runs, so that they do not starve
    it.

    Args:
        lookahead: how many requests are tried in one round, 1 or more.
        patience: how often a request may be overtaken, 0 or more.

    Raises:
        ConfigError: one of them is no such number.
    """

    def __init__(self, lookahead: int = 4, patience: int = 8) -> None:
        self.lookahead = expect_count("WaitingQueue: lookahead", lookahead, 1)
        self.patience = expect_count("WaitingQueue: patience", patience)
        self._line: deque[_Place[T]] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[T]:
        """Everyone in line, first to last."""
        return iter([place.item for place in self._line])

    def append(self, item: T) -> None:
        """A new request, last in line."""
        self._line.append(_Place(item))

    def push_front(self, item: T) -> None:
        """A retracted request, first in line: it ran before the others."""
        self._line.appendleft(_Place(item))

    def round(self) -> Iterator[T]:
        """The requests to try now, in order; call `take` for each that was admitted."""
        for place in list(islice(self._line, self.lookahead)):
            yield place.item
            if place.waiting and place.overtaken >= self.patience:
                return

    def take(self, item: T) -> None:
        """`item` was admitted or rejected: it leaves the line.

        Raises:
            ConfigError: it is not in the line.
        """
        for index, place in enumerate(self._line):
            if place.item is item:
                place.waiting = False
                del self._line[index]
                for passed in islice(self._line, index):
                    passed.overtaken += 1
                return
        raise ConfigError(f"{item!r:.60} is not in the line of {len(self._line)}; append it first")


class _Place(Generic[T]):
    """A request in line and how often others passed it."""

    __slots__ = ("item", "overtaken", "waiting")

    def __init__(self, item: T) -> None:
        self.item = item
        self.overtaken = 0
        self.waiting = True
