"""Allocates rows of a pool.

Slots travel through kvgraft as `bytes` holding native int32 values: one small immutable object
per node and component, split and joined with slices, turned into an index tensor once per copy.
Where pools share one byte budget, slots are taken and given back at the end of a pool, so the
numbers of the others stay.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from kvgraft.errors import ConfigError, ContractViolation

SLOT_BYTES: Final = 4
"""Bytes of one slot number (int32)."""

FRESH_AT_ONCE: Final = 4096
"""Slots written down at a time, at least."""


class SlotAllocator:
    """A last-in-first-out stack of free slot numbers.

    Numbers are written down when they are first needed, so that opening a pool costs no more for
    many slots than for few.

    Args:
        capacity: number of slots, numbered from 0.

    Attributes:
        end: slot numbers below it are open; the capacity, where that never changes.
        closing: taken slots that leave the pool when they are freed; see `resizing`.
        n_free: slots nobody owns.
        n_allocated: slots taken so far, again and again.

    Not thread safe: the scheduler thread owns it.
    """

    __slots__ = ("_free", "_n_fresh", "capacity", "closing", "end", "n_allocated", "n_free")

    def __init__(self, capacity: int) -> None:
        if not 0 <= capacity < 2**31:
            raise ConfigError(f"pool: {capacity} slots do not fit int32; use 0 to {2**31 - 1}")
        self.capacity = self.end = capacity
        self.closing = 0
        self._free = array("i")
        # The last ones, never taken so far; they come after everything in the stack.
        self._n_fresh = capacity
        self.n_free = capacity
        self.n_allocated = 0

    def allocate(self, n: int) -> bytes | None:
        """Take `n` slots, int32 `[n]` as bytes; None, and nothing taken, if fewer are free."""
        free = self._free
        if n <= 0:
            return b""
        if n > len(free):
            if n > self.n_free:
                return None
            free = self._write_down(max(n - len(free), FRESH_AT_ONCE))
        taken = free[-n:].tobytes()
        del free[-n:]
        self.n_free -= n
        self.n_allocated += n
        return taken

    def free(self, slots: bytes) -> None:
        """Give slots back; each must have been taken and not given back since (T9).

        A slot given back twice while others are out shows in `check_integrity()`: to look at every
        slot here costs more than 2 % of a request.

        Raises:
            ContractViolation: more slots than were taken; nothing is given back.
        """
        free = self.n_free + len(slots) // SLOT_BYTES
        if free > self.capacity:
            raise ContractViolation("T9", None, f"{free} free slots in a pool of {self.capacity}")
        self._free.frombytes(slots)
        self.n_free = free

    def free_slots(self, *, fresh: bool = True) -> list[int]:
        """The free slots; with or without `fresh` ones, the last below `end`, never handed out."""
        return [*range(self.end - 1, self.end - 1 - fresh * self._n_fresh, -1), *self._free]

    def _write_down(self, n: int) -> array[int]:
        """Put the next `n` fresh slots under the stack, the first of them on top."""
        first = self.end - self._n_fresh
        n = min(n, self._n_fresh)
        fresh = array("i")
        fresh.frombytes(np.arange(first + n - 1, first - 1, -1, dtype=np.int32).tobytes())
        self._free = fresh + self._free
        self._n_fresh -= n
        return self._free


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
