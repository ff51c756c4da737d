"""Which rows of a pool are free.

Slots travel through kvgraft as `bytes` holding native int32 values: one small immutable object
per node and component, split and joined with slices, turned into an index tensor once per copy.
"""

from __future__ import annotations

from array import array

from kvgraft.errors import ConfigError, ContractViolation

__all__ = ["SLOT_BYTES", "SlotAllocator"]

SLOT_BYTES = 4
"""Bytes of one slot number (int32)."""


class SlotAllocator:
    """A last-in-first-out stack of free slot numbers.

    Args:
        capacity: number of slots, numbered from 0.

    Not thread safe: the scheduler thread owns it.
    """

    __slots__ = ("_free", "capacity")

    def __init__(self, capacity: int) -> None:
        if not 0 <= capacity < 2**31:
            raise ConfigError(f"pool: {capacity} slots do not fit int32; use 0 to {2**31 - 1}")
        self.capacity = capacity
        self._free = array("i", range(capacity - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """Slots nobody owns."""
        return len(self._free)

    def allocate(self, n: int) -> bytes | None:
        """Take `n` slots, int32 `[n]` as bytes; None, and nothing taken, if fewer are free."""
        free = self._free
        if n <= 0:
            return b""
        if n > len(free):
            return None
        taken = free[-n:].tobytes()
        del free[-n:]
        return taken

    def free(self, slots: bytes) -> None:
        """Give slots back; each must have been taken and not given back since (T9).

        A slot given back twice while others are out shows in `check_integrity()`: to look at every
        slot here costs more than 2 % of a request.

        Raises:
            ContractViolation: more slots than were taken; nothing is given back.
        """
        free = len(self._free) + len(slots) // SLOT_BYTES
        if free > self.capacity:
            raise ContractViolation("T9", None, f"{free} free slots in a pool of {self.capacity}")
        self._free.frombytes(slots)

    def free_slots(self) -> list[int]:
        """The free slot numbers, for integrity checks."""
        return list(self._free)
