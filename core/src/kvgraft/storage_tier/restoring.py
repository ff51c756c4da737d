"""A restarted process fills HOST with what its predecessor used last."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.storage_tier.fetching import OVER_BUDGET, SHORT
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
        self._under_way: list[tuple[Boundary, Prefetch]] = []

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
        for boundary, prefetch in [each for each in self._under_way if each[1].ended]:
            self._under_way.remove((boundary, prefetch))
            self.tokens += prefetch.gained_tokens
            if prefetch.reason.startswith(SHORT):
                self._left.clear()
            elif prefetch.reason.startswith(OVER_BUDGET) and self._prefetching.n_in_flight:
                self._left.append(boundary)  # when others have come
        if not self._prefetching.scene.storage.attached:
            return
        for _ in range(AT_A_TIME - len(self._under_way)):
            if not self._left:
                return
            boundary = self._left.pop()
            prefetch = self._prefetching.start(boundary.key(), limit=boundary.pages, spare=True)
            self._under_way.append((boundary, prefetch))

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{self.n_in_flight} left"
        return f"<Restoring of {self.n_boundaries} boundaries: {self.tokens} tokens, {state}>"

    def stop(self) -> None:
        """Go for nothing more."""
        self._left.clear()
