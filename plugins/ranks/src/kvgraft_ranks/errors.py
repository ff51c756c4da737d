"""Errors of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from kvgraft.errors import KvgraftError

__all__ = ["RanksDivergedError", "RanksError"]


class RanksError(KvgraftError):
    """Another rank is dead, hangs or has failed; nothing is served from then on."""


class RanksDivergedError(RanksError):
    """Ranks decided differently (D4); nothing is served from then on.

    Attributes:
        number: of the first call whose results differ, counted from 1 since the cache was opened.
        results: by rank, the call and its result; a rank that made fewer calls has an empty text.
    """

    def __init__(self, number: int, results: Mapping[int, str]) -> None:
        shown = "; ".join(f"rank {rank}: {text or 'no call'}" for rank, text in results.items())
        super().__init__(
            f"D4: ranks differ from call {number} on: {shown}; nothing is served any more: close "
            "the caches, and give all ranks the same calls and the same packages"
        )
        self.number = number
        self.results = dict(results)
