"""Finds the lengths of a prefix that can be restored if a model has several pools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Need", "Restorable", "restorable"]


@dataclass(frozen=True)
class Need:
    """The data that a pool needs to restore a prefix.

    Attributes:
        pool: its name.
        there: per page of the prefix, whether the store has this pool's data of it.
        trailing: pages at the end of a prefix that are needed; None for all pages.
    """

    pool: str
    there: Sequence[bool]
    trailing: int | None = None

    def lengths(self) -> list[int]:
        """Prefixes that this pool can restore, in pages, ascending."""
        found, run = [], 0
        for length, here in enumerate(self.there, 1):
            run = run + 1 if here else 0
            if run >= (length if self.trailing is None else min(length, self.trailing)):
                found.append(length)
        return found


@dataclass(frozen=True)
class Restorable:
    """The lengths of a prefix that a store can restore.

    Attributes:
        lengths: prefixes that all pools can restore, in pages, ascending.
        hits: the longest length per pool, of pools that can restore any.
    """

    lengths: list[int]
    hits: dict[str, int]

    @property
    def longest(self) -> int:
        """Pages of the longest prefix; 0 if there is none."""
        return self.lengths[-1] if self.lengths else 0


def restorable(needs: Iterable[Need]) -> Restorable:
    """Lengths that every pool can restore."""
    all_lengths: set[int] | None = None
    hits: dict[str, int] = {}
    for need in needs:
        mine = need.lengths()
        if mine:
            hits[need.pool] = mine[-1]
        all_lengths = {*mine} if all_lengths is None else all_lengths & {*mine}
    return Restorable(sorted(all_lengths or ()), hits)
