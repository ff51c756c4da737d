"""Fills HOST after a restart with the data that was used last before it."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.tree.keys import TOKEN_BYTES
from kvgraft_storage.tier.inventory import ShortOf
from kvgraft_storage.tier.prefetching import Prefetch, Prefetching
from kvgraft_storage.tier.snapshot import Boundary

__all__ = ["Restoring"]

AT_A_TIME = 4
"""Boundaries fetched at a time."""


class Restoring:
    """Prefetches the boundaries of a snapshot, most recently used first, while HOST has room.

    It evicts nothing, and runs in the cache's polls, beside requests.

    Attributes:
        n_boundaries: number of boundaries.
        tokens: tokens that can be resumed from now; shared pages count once.
    """

    def __init__(self, prefetching: Prefetching, boundaries: Sequence[Boundary]) -> None:
        self.n_boundaries = len(boundaries)
        self.tokens = 0
        self._prefetching = prefetching
        self._left = list(reversed(boundaries))
        self._under_way: list[tuple[Boundary, Prefetch]] = []
        self._counted: dict[tuple[object, int], int] = {}

    @property
    def ended(self) -> bool:
        """Whether everything was tried for which there is room."""
        return not self._left and not self._under_way

    @property
    def n_in_flight(self) -> int:
        """Boundaries not tried yet, or on their way."""
        return len(self._left) + len(self._under_way)

    def poll(self) -> None:
        """Process arrived pages, start more prefetches; never waits."""
        for boundary, prefetch in [each for each in self._under_way if each[1].ended]:
            self._under_way.remove((boundary, prefetch))
            self._count(boundary, prefetch)
            if prefetch.short_of is ShortOf.HOST:
                self._left.clear()
        if not self._prefetching.context.client.attached:
            return
        for _ in range(AT_A_TIME - len(self._under_way)):
            if not self._left:
                return
            boundary = self._left.pop()
            prefetch = self._prefetching.start(boundary.key(), limit=boundary.pages, spare=True)
            self._under_way.append((boundary, prefetch))

    def _count(self, boundary: Boundary, prefetch: Prefetch) -> None:
        """Count the tokens it gained, on the snapshot's nodes up to its boundary."""
        namespace, records = boundary.space
        number, end = boundary.number, prefetch.key.n_tokens
        while number:
            parent, tokens, _ = records[number - 1]
            start, node = end - len(tokens) // TOKEN_BYTES, (namespace, number)
            gained = min(end, prefetch.tokens) - max(start, prefetch.anchor_tokens)
            before = self._counted.get(node, 0)
            if gained > before:
                self._counted[node] = gained
                self.tokens += gained - before
            number, end = parent, start

    def __repr__(self) -> str:
        state = "ended" if self.ended else f"{self.n_in_flight} left"
        return f"<Restoring of {self.n_boundaries} boundaries: {self.tokens} tokens, {state}>"

    def stop(self) -> None:
        """Start no more prefetches."""
        self._left.clear()
