"""Keeps the last batches for subscribers that missed some."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Kept", "ReplayBuffer"]


class Kept(NamedTuple):
    """A batch that was sent.

    Attributes:
        sequence: its number.
        payload: its bytes.
    """

    sequence: int
    payload: bytes


class ReplayBuffer:
    """The last batches, as many as fit.

    Args:
        limit: most batches.
        limit_nbytes: most bytes of all of them; the last one is always kept.

    Attributes:
        nbytes: their bytes.
    """

    def __init__(self, limit: int, limit_nbytes: int) -> None:
        self._limit = limit
        self._limit_nbytes = limit_nbytes
        self._kept: deque[Kept] = deque()
        self._last_clear = -1
        self.nbytes = 0

    def add(self, sequence: int, payload: bytes, *, clears: bool) -> None:
        """Keep a batch; `clears` says that a subscriber that applies it needs no earlier one."""
        self._kept.append(Kept(sequence, payload))
        self.nbytes += len(payload)
        if clears:
            self._last_clear = sequence
        while len(self._kept) > 1 and (
            len(self._kept) > self._limit or self.nbytes > self._limit_nbytes
        ):
            self.nbytes -= len(self._kept.popleft().payload)

    def since(self, sequence: int) -> Iterator[Kept]:
        """The kept batches from that number on."""
        return (each for each in self._kept if each.sequence >= sequence)

    def suffices(self, sequence: int) -> bool:
        """Whether the kept batches since then say where all data is."""
        return not self._kept or self._kept[0].sequence <= max(sequence, self._last_clear)
