"""Requests that wait for memory: one line for each priority."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvgraft_scheduling import WaitingQueue
from kvgraft_transformers.engine.generation import Generation

__all__ = ["PriorityLine"]


class PriorityLine:
    """Requests with a lower number of `priority` go first; equal ones as `WaitingQueue` has them.

    A request is tried only when none of a lower number waits. So one that does not fit yet holds up
    all of higher numbers until it runs, and these starve while lower numbers keep coming.
    """

    def __init__(self) -> None:
        self._lines: defaultdict[int, WaitingQueue[Generation]] = defaultdict(WaitingQueue)

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))  # other threads ask, too

    def __iter__(self) -> Iterator[Generation]:
        """Everyone in line, first to last."""
        for _, line in sorted(self._lines.items()):
            yield from line

    def append(self, generation: Generation) -> None:
        """A new request, last of its priority; one that was in line has its place again."""
        line = self._line_of(generation)
        if generation.place is None:
            line.append(generation)
        else:
            line.put_back(generation.place)

    def round(self) -> Iterator[Generation]:
        """The requests to try now, in order; call `take` for each that leaves the line."""
        for _, line in sorted(self._lines.items()):
            yield from line.round()
            if line:
                return

    def take(self, generation: Generation) -> None:
        """A request leaves the line.

        Raises:
            ValueError: it is not in it.
        """
        line = self._line_of(generation)
        generation.place = line.take(generation)
        if not line:
            del self._lines[generation.request.priority]

    def _line_of(self, generation: Generation) -> WaitingQueue[Generation]:
        return self._lines[generation.request.priority]
