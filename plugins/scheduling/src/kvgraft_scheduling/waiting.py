"""The order in which waiting requests are tried (A13)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from typing import Generic, TypeVar

from kvgraft.errors import ConfigError
from kvgraft.sizes import expect_count

__all__ = ["WaitingPlace", "WaitingQueue"]

T = TypeVar("T")

_ARRIVALS = count()


class WaitingPlace(Generic[T]):
    """A request's place in line.

    Attributes:
        item: the request, or its key.
        arrived: its number in the order of arrival, over all queues: of equal requests, lower
            numbers are served first and retracted last.
        overtaken: how often others passed it.
        waiting: whether it is in the queue.
    """

    __slots__ = ("arrived", "item", "overtaken", "waiting")

    def __init__(self, item: T) -> None:
        self.item = item
        self.arrived = next(_ARRIVALS)
        self.overtaken = 0
        self.waiting = True


class WaitingQueue(Generic[T]):
    """First come first served, with bounded overtaking.

    Smaller requests may pass one that does not fit, so that it does not starve them, but only
    `max_overtakes` times. Then no request passes it until it runs, so that they do not starve it. A
    request that returns keeps its place in the order of arrival.

    Args:
        lookahead: how many requests are tried in one round, 1 or more.
        max_overtakes: how often a request may be overtaken, 0 or more.

    Raises:
        ConfigError: an argument is no such number.
    """

    def __init__(self, lookahead: int = 4, max_overtakes: int = 8) -> None:
        self.lookahead = expect_count("WaitingQueue: lookahead", lookahead, 1)
        self.max_overtakes = expect_count("WaitingQueue: max_overtakes", max_overtakes)
        self._line: deque[WaitingPlace[T]] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[T]:
        """Everyone in line, first to last."""
        return iter([place.item for place in self._line])

    def append(self, item: T) -> WaitingPlace[T]:
        """A new request, last in line; returns its place."""
        place = WaitingPlace(item)
        self._line.append(place)
        return place

    def put_back(self, place: WaitingPlace[T]) -> None:
        """Put a request that had left back in its place, behind those that came before it.

        It was retracted, or its load-back failed. Its count of overtakings goes on, so that neither
        it nor those behind it begin to wait anew.

        Args:
            place: what `take` returned.

        Raises:
            ConfigError: it is no place, or is in the queue.
        """
        if not isinstance(place, WaitingPlace):
            raise ConfigError(f"put_back: {place!r:.60} is no place; give what `take` returned")
        if place.waiting:
            raise ConfigError(f"{place.item!r:.60} is in the queue; put it back once it was taken")
        place.waiting = True
        behind = sum([each.arrived < place.arrived for each in self._line])
        self._line.insert(behind, place)

    def round(self) -> Iterator[T]:
        """The requests to try now, in order; call `take` for each that was admitted."""
        for place in list(islice(self._line, self.lookahead)):
            yield place.item
            if place.waiting and place.overtaken >= self.max_overtakes:
                return

    def take(self, item: T) -> WaitingPlace[T]:
        """`item` was admitted or rejected: take it out of the queue.

        Returns:
            Its place, for `put_back` if it does not end.

        Raises:
            ConfigError: it is not in the queue.
        """
        for index, place in enumerate(self._line):
            if place.item is item:
                place.waiting = False
                del self._line[index]
                for passed in islice(self._line, index):
                    passed.overtaken += 1
                return place
        raise ConfigError(f"{item!r:.60} is not in the queue of {len(self._line)}; append it first")
