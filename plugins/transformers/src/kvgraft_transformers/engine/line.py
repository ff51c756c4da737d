"""The queue of requests that wait for memory: one FIFO for each priority."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from kvgraft_scheduling import WaitingQueue
from kvgraft_transformers.engine.generation import Generation

__all__ = ["PriorityLine"]


class PriorityLine:
    """A queue with the lowest `priority` number first; equal ones are in a `WaitingQueue`.

    A request is tried only if none with a lower number waits. So one that does not fit yet blocks
    all with higher numbers until it runs, and these starve while lower numbers keep arriving.
    """

    def __init__(self) -> None:
        self._lines: defaultdict[int, WaitingQueue[Generation]] = defaultdict(WaitingQueue)

    def __len__(self) -> int:
        return sum(map(len, list(self._lines.values())))  # other threads call this, too

    def __iter__(self) -> Iterator[Generation]:
        """All waiting requests, first to last."""
        for _, line in sorted(self._lines.items()):
            yield from line

    def append(self, generation: Generation) -> None:
        """Append a request, last of its priority; one that was in the queue gets its place back."""
        line = self._line_of(generation)
        if generation.place is None:
            line.append(generation)
        else:
            line.put_back(generation.place)

    def round(self) -> Iterator[Generation]:
        """The requests to try now, in order; call `take` for each that leaves the queue."""
        for _, line in sorted(self._lines.items()):
            yield from line.round()
            if line:
                return

    def take(self, generation: Generation) -> None:
        """Remove a request that leaves the queue.

        Raises:
            ValueError: it is not in it.
        """
        line = self._line_of(generation)
        generation.place = line.take(generation)
        if not line:
            del self._lines[generation.request.priority]

    def _line_of(self, generation: Generation) -> WaitingQueue[Generation]:
        return self._lines[generation.request.priority]
