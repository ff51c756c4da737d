"""The policy `lru`: what was used least recently leaves first."""

from __future__ import annotations

from typing import Any

from kvgraft.compiled import mypyc_attr
from kvgraft.policies.policy import Hint, Pool, Use
from kvgraft.policies.recency import RecencyQueue


@mypyc_attr(allow_interpreted_subclasses=True)
class LeastRecentlyUsed:
    """Least recently used first; all requests are of one class."""

    name = "lru"
    classifies = False

    def order(self, pool: Pool) -> RecencyQueue:
        """A queue by stamps."""
        del pool
        return RecencyQueue()

    def opened(self, base_tokens: int) -> None:
        """Nothing depends on sizes."""

    def classify(self, use: Use) -> tuple[int, Any]:
        """One class for all."""
        del use
        return 0, None

    def admitted(self, use: Use, stamp: int) -> None:
        """Nothing is noted."""

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        """One class for all."""
        del use, stamp, hint
        return 0

    def describe(self, use_class: int) -> str:
        """Nothing: there is one class."""
        del use_class
        return ""
