"""Digests of a cache's decisions, in order (D4)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from hashlib import blake2b

__all__ = ["CallLog"]

KEPT = 1024
"""Calls of which the results are kept, to name the first one that differs."""

DIGEST_NBYTES = 8


class CallLog:
    """Results of calls: a digest of all, and the last ones as texts.

    Attributes:
        number: of the last call, from 1.
        digest: of all results up to it.
    """

    def __init__(self) -> None:
        self.number = 0
        self.digest = bytes(DIGEST_NBYTES)
        self._under_way = ""
        self._kept: deque[tuple[int, str, str]] = deque(maxlen=KEPT)

    def begin(self, call: str) -> None:
        """A call begins; until it is noted, `kept` says that it has not ended."""
        self._under_way = call

    def note(self, call: str, result: Sequence[object]) -> None:
        """Add a call and its result: numbers and texts that are equal on all ranks."""
        self.number += 1
        text = f"{call}{result}"
        self.digest = blake2b(self.digest + text.encode(), digest_size=DIGEST_NBYTES).digest()
        self._kept.append((self.number, self.digest.hex(), text))
        self._under_way = ""

    def kept(self) -> list[tuple[int, str, str]]:
        """Number, digest and text of the last calls, oldest first; of one under way no digest."""
        kept = list(self._kept)
        if self._under_way:
            kept.append((self.number + 1, "", f"{self._under_way}, under way"))
        return kept


def first_difference(logs: Sequence[Sequence[Sequence[object]]]) -> tuple[int, dict[int, str]]:
    """The first call that differs between ranks, by `CallLog.kept` of each.

    Returns:
        Its number, and its text by rank; empty where a rank did not make that call.
    """
    by_rank = [{int(str(n)): (digest, str(text)) for n, digest, text in log} for log in logs]
    newest = max(max(each, default=0) for each in by_rank)
    number = max(min(each, default=1) for each in by_rank)
    while number < newest and len({each.get(number) for each in by_rank}) == 1:
        number += 1
    found = [each.get(number) for each in by_rank]
    return number, {rank: each[1] if each else "" for rank, each in enumerate(found)}
