"""A restarted process fills HOST with what its predecessor used last."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.storage_tier.prefetching import Prefetch, Prefetching
from kvgraft.storage_tier.snapshot import Boundary

__all__ = ["Restoring"]

AT_A_TIME = 4
"""Boundaries fetched at a time."""


class Restoring:
    """Prefetches the boundaries of a snapshot, most recently used first, while HOST has room.

    Nothing is evicted for it, and it goes on with the cache's polls, beside requests.

    Attributes:
        n_boundaries: how many there are.
        tokens: tokens brought back so far.
    """

    def __init__(self, prefetching: Prefetching, boundaries: Sequence[Boundary]) -> None:
        self.n_boundaries = len(boundaries)
        self.tokens = 0
        self._prefetching = prefetching
        self._left = list(reversed(boundaries))
        self._under_way: list[Prefetch] = []

    @property
    def ended(self) -> bool:
        """Whether all was tried that there is room for."""
        return not self._left and not self._under_way

    @property
    def n_in_flight(self) -> int:
        """Boundaries not tried yet, or on their way."""
        return len(self._left) + len(self._under_way)

    def poll(self) -> None:
        """Take in what has come, go for more; never waits."""
        for prefetch in [each for each in self._under_way if each.ended]:
            self._under_way.remove(prefetch)
            self.tokens += prefetch.gained_tokens
            if "is short" in prefetch.reason:
                self._left.clear()
        while self._left and len(self._under_way) < AT_A_TIME:
            boundary = self._left.pop()
            prefetch = self._prefetching.start(boundary.key, limit=boundary.pages, spare=True)
            if not prefetch.ended:
                self._under_way.append(prefetch)

    def stop(self) -> None:
        """Go for nothing more."""
        self._left.clear()
