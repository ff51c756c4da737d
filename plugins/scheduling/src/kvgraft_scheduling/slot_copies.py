"""Copies within a pool for an engine that owns the memory, composed into one gather and scatter.

The cache names copies one after the other, by a pool's `on_copy`: of states, and of data that moves
when pools share a budget. Workers rather make all of them at once, before a pass of the model (N3).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["SlotCopies"]

Slots = npt.NDArray[np.int32]


class SlotCopies:
    """Collects the copies of one pool until they are taken.

    A copy of a copy becomes a copy of the first source, and the last of several copies to one
    target wins. So reading all sources before writing any target gives the bytes of the copies made
    one after the other.

    Args:
        pool: the pool, which stops copying by itself.
    """

    def __init__(self, pool: Any) -> None:
        self._sources: dict[int, int] = {}
        """By target."""
        pool.on_copy = self.add

    def add(self, sources: bytes, targets: bytes) -> None:
        """Add copies of slots, both int32 `[n]` as bytes; no slot is both a source and a target."""
        numbers = np.frombuffer(sources, np.int32).tolist()
        first = [self._sources.get(source, source) for source in numbers]
        for source, target in zip(first, np.frombuffer(targets, np.int32).tolist()):
            if source == target:
                self._sources.pop(target, None)
            else:
                self._sources[target] = source

    def take(self) -> tuple[Slots, Slots]:
        """Sources and targets, int32 `[n]` each; every copy is returned once."""
        pairs = np.array([*self._sources.items()], np.int32).reshape(-1, 2)
        self._sources.clear()
        return pairs[:, 1], pairs[:, 0]
