"""Allocates rows of a pool.

Slots travel through kvgraft as `bytes` holding native int32 values: one small immutable object
per node and component, split and joined with slices, turned into an index tensor once per copy.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from kvgraft.compiled import mypyc_attr
from kvgraft.errors import ConfigError, ContractViolation

SLOT_BYTES: Final = 4
"""Bytes of one slot number (int32)."""

FRESH_AT_ONCE: Final = 4096
"""Slots listed at a time, at least."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SlotAllocator:
    """A last-in-first-out stack of free slot numbers.

    Numbers are listed when they are first needed, so that opening a pool costs no more for many
    slots than for few.

    Args:
        capacity: number of slots, numbered from 0.

    Attributes:
        end: slot numbers below it are open; the capacity, where that never changes.
        closing: taken slots that leave the pool when they are freed; always 0 but in a pool whose
            boundary moves.
        n_free: slots nobody owns.
        n_allocated: slots taken so far, each time counted.

    Not thread safe: the scheduler thread owns it.
    """

    __slots__ = ("_free", "_n_fresh", "capacity", "closing", "end", "n_allocated", "n_free")

    def __init__(self, capacity: int) -> None:
        if not 0 <= capacity < 2**31:
            raise ConfigError(f"pool: {capacity} slots do not fit int32; use 0 to {2**31 - 1}")
        self.capacity = self.end = capacity
        self.closing = 0
        self._free = array("i")
        # The last slots, never taken so far; they are handed out after the stack is empty.
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

        `check_integrity()` finds a slot that was freed twice while others are out: checking every
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
