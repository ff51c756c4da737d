"""Pools whose boundary moves: slots are added and removed at the end (K7).

Other slots keep their numbers.
"""

from __future__ import annotations

from array import array

import numpy as np

from kvgraft.errors import ContractViolation
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.tree.ledger import Ledger

__all__ = ["MovableLedger", "ResizableAllocator", "allocator_within"]


class ResizableAllocator(SlotAllocator):
    """A stack of free slots whose end moves: slots below `end` are open, the others are closed.

    A closed slot that is free leaves the pool at once. One that is taken leaves it when its owner
    frees it; `capacity`, `end + closing`, counts it until then.

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


def allocator_within(n_slots: int, slot_nbytes: int, limit_nbytes: int) -> ResizableAllocator:
    """An allocator of so many slots that may grow until its pool has the whole budget."""
    most = min(limit_nbytes // slot_nbytes, 2**31 - 1) if slot_nbytes else 0
    return ResizableAllocator(n_slots, max(n_slots, most))


class MovableLedger(Ledger):
    """The books of a pool whose boundary moves (K7).

    Closed slots that are taken leave the pool when they are freed. The headroom keeps one slot for
    each of them, so a promise is covered while data moves, and after.
    """

    __slots__ = ()

    @property
    def headroom(self) -> int:
        """Slots that may be given away without breaking a promise."""
        allocator = self.allocator
        return allocator.n_free + self.evictable - self.promised - allocator.closing
