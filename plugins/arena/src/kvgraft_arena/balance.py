"""Decides where the boundary moves: to the pool whose shadow is hit more.

It compares hits over equal bytes. It has no clock and no random numbers, so equal calls move equal
boundaries (K3). Every 50 requests it compares the hits of all shadows; at each comparison earlier
hits are weighted by 0.8. The pool with the most gets an extent of the pool with the fewest, if it
has 1.2 times as many.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft_arena.extents import Arena, ArenaPool
from kvgraft_arena.shadows import Shadow

__all__ = ["Balance"]

REQUESTS = 50
KEPT = 0.8
LEAD = 1.2


class Balance:
    """Moves the boundaries of one arena.

    Args:
        arena: the extents.
        shadows: the shadow of each of its pools, in their order.

    Attributes:
        gains: the weighted hits of each pool's shadow, in tokens, in the same order.
    """

    def __init__(self, arena: Arena, shadows: Sequence[Shadow]) -> None:
        self.arena = arena
        self.shadows = shadows
        self.gains = [0.0] * len(shadows)
        self._until = REQUESTS

    def used(self) -> None:
        """A request was counted."""
        self._until -= 1

    def step(self) -> None:
        """Compare, if it is time, and begin to move an extent if a pool gains by it."""
        if self._until > 0:
            return
        self._until = REQUESTS
        for at, shadow in enumerate(self.shadows):
            self.gains[at] = self.gains[at] * KEPT + shadow.hits
            shadow.hits = 0
        ranked = sorted(zip(self.gains, self.arena.pools), key=_gain, reverse=True)
        gain, taker = ranked[0]
        for loss, giver in reversed(ranked[1:]):
            if gain <= LEAD * loss or self.arena.is_pending:
                return
            if self.arena.begin(giver, taker):
                return


def _gain(ranked: tuple[float, ArenaPool]) -> float:
    return ranked[0]
