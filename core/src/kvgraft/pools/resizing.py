"""Slots of a pool that shares one byte budget with others: its boundary moves.

Slots are taken and given back at its end, so the numbers of the others stay. Their memory is
`pools.reserved`.
"""

from __future__ import annotations

from array import array

import numpy as np

from kvgraft.errors import ContractViolation
from kvgraft.pools.allocator import SlotAllocator

__all__ = ["ResizableAllocator", "slots_within"]


class ResizableAllocator(SlotAllocator):
    """A stack of free slots whose end moves: slots below `end` are open, the others are closed.

    A closed slot that is free is gone at once. One that is taken stays its owner's and leaves the
    pool when it is freed, so `capacity`, `end + closing`, counts it until then.

    Args:
        capacity: slots that are open at first, numbered from 0.
        limit: the most that can be open.

    Attributes:
        limit: see above.
        closing: closed slots that are taken.
    """

    __slots__ = ("limit",)

    def __init__(self, capacity: int, limit: int) -> None:
        SlotAllocator.__init__(self, capacity)
        self.limit = limit

    def grow(self, n: int) -> None:
        """Open the next `n` slots; they are handed out last.

        Raises:
            ContractViolation: K7, beyond the limit, or while closed slots are taken.
        """
        if n < 0 or self.end + n > self.limit or self.closing:
            raise ContractViolation(
                "K7",
                None,
                f"a pool of {self.end} slots, {self.closing} closed ones taken, grows by {n}; it "
                f"has room for {self.limit}",
            )
        self._n_fresh += n
        self.n_free += n
        self.end += n
        self.capacity += n

    def close(self, first: int) -> None:
        """Close the slots from `first` on: none of them is handed out any more; O(free slots)."""
        if not 0 <= first <= self.end:
            raise ContractViolation("K7", None, f"a pool of {self.end} slots closes at {first}")
        n_fresh = min(self._n_fresh, self.end - first)
        free = np.frombuffer(self._free, dtype=np.int32)
        n_stacked = int((free >= first).sum())
        if n_stacked:
            self._free = array("i", free[free < first].tobytes())
        self._n_fresh -= n_fresh
        self.n_free -= n_fresh + n_stacked
        self.closing += self.end - first - n_fresh - n_stacked
        self.end = first
        self.capacity = first + self.closing

    def free(self, slots: bytes) -> None:
        """Give slots back; closed ones leave the pool (T9).

        Raises:
            ContractViolation: more slots than were taken; nothing is given back.
        """
        if not self.closing:
            SlotAllocator.free(self, slots)
            return
        numbers = np.frombuffer(slots, dtype=np.int32)
        is_open = numbers < self.end
        n_closed = len(numbers) - int(is_open.sum())
        if n_closed > self.closing:
            raise ContractViolation(
                "T9", None, f"{n_closed} closed slots are freed, {self.closing} are taken"
            )
        SlotAllocator.free(self, numbers[is_open].tobytes())
        self.closing -= n_closed
        self.capacity -= n_closed


def slots_within(limit_nbytes: int, slot_nbytes: int) -> int:
    """The most slots of a pool that has all of a budget to itself."""
    return min(limit_nbytes // slot_nbytes, 2**31 - 1) if slot_nbytes else 0
