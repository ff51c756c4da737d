"""Happens-before, byte by byte.

Every stream, and every thread of the host, counts its own steps. A step carries a clock: for each
of them, the last step known to have happened before. The clock passes on with submissions and
events. Two accesses to a byte, of which one writes, must have clocks of which one knows the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvgraft_accelerator.protocol import Purpose

__all__ = ["Access", "Clock", "Memory", "Ordering", "Unordered", "join"]

Clock = dict[str, int]
"""The last step known, by the name of a stream or of a thread of the host."""


def join(clock: Clock, other: Clock) -> None:
    """Know what another clock knows, too."""
    for name, step in other.items():
        if clock.get(name, 0) < step:
            clock[name] = step


class Access(NamedTuple):
    """A step that touches bytes.

    Attributes:
        number: of the step, in the order of submission.
        label: its name in messages.
        where: the stream or thread.
        step: its number there.
        purpose: what it is for; None on the host.
        writes: whether it writes.
        clock: what it knows.
    """

    number: int
    label: str
    where: str
    step: int
    purpose: Purpose | None
    writes: bool
    clock: Clock

    def knows(self, other: Access) -> bool:
        """Whether `other` happened before it."""
        return self.clock.get(other.where, 0) >= other.step


class Unordered(NamedTuple):
    """Two accesses to the same bytes, one of them a write, that may happen in either order.

    Attributes:
        first, second: in the order of submission.
        memory: whose bytes.
        nbytes: how many of them.
    """

    first: Access
    second: Access
    memory: str
    nbytes: int

    @property
    def rule(self) -> str:
        """The rule of the contract that the pair breaks."""
        first, second = self.first.purpose, self.second.purpose
        if first is second is Purpose.COMPUTE:
            return "M8"  # a copy within a pool left the stream of the other kernels
        if first in (Purpose.BACKUP, Purpose.GATHER):
            return "B3"  # its source, or its target, is used before it is acknowledged
        if first in (Purpose.LOAD_BACK, Purpose.SCATTER):
            return "L8" if self.first.writes and self.second.writes else "R7"
        return "B4"

    def __str__(self) -> str:
        first, second = self.first, self.second
        return (
            f"{second.label} on {second.where} "
            f"{'writes' if second.writes else 'reads'} {self.nbytes} bytes of {self.memory} that "
            f"{first.label} on {first.where} {'writes' if first.writes else 'reads'}; no event "
            f"orders them: let {second.where} wait for one that {first.where} records behind "
            f"{first.label}"
        )


class Memory:
    """One allocation, with the last accesses to each of its bytes.

    Args:
        label: its name in messages.
        nbytes: how much.

    Attributes:
        data: the bytes, uint8 `[nbytes]`.
        address: of the first.
    """

    def __init__(self, label: str, nbytes: int, address: int) -> None:
        self.label = label
        self.address = address
        self.data = torch.zeros(nbytes, dtype=torch.uint8)
        self._written = np.zeros(nbytes, dtype=np.int32)
        self._read: dict[str, npt.NDArray[np.int32]] = {}

    def before(self, at: Any, *, writes: bool) -> npt.NDArray[np.int32]:
        """Numbers of the last accesses to bytes that another access must be ordered with."""
        found = [self._written[at]]
        if writes:
            found += [read[at] for read in self._read.values()]
        return np.concatenate(found)

    def note(self, at: Any, access: int, where: str, *, writes: bool) -> None:
        """The last access to some bytes is now that of this number."""
        if writes:
            self._written[at] = access
            return
        if where not in self._read:
            self._read[where] = np.zeros_like(self._written)
        self._read[where][at] = access


class Ordering:
    """Checks every access against those before it.

    Attributes:
        unordered: the pairs found, each two labels once.
    """

    def __init__(self) -> None:
        self.unordered: list[Unordered] = []
        self._accesses: list[Access] = []
        self._found: set[tuple[str, ...]] = set()

    def check(self, access: Access, memory: Memory, at: npt.NDArray[np.int64]) -> None:
        """An access to the bytes `at` of some memory happens now."""
        numbers, counts = np.unique(memory.before(at, writes=access.writes), return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist()):
            if number:
                other = self._accesses[number - 1]
                if not access.knows(other) and not other.knows(access):
                    self._note(access, other, memory, count)
        self._accesses.append(access)
        memory.note(at, len(self._accesses), access.where, writes=access.writes)

    def _note(self, access: Access, other: Access, memory: Memory, nbytes: int) -> None:
        first, second = sorted((access, other), key=lambda each: each.number)
        key = (first.label, first.where, second.label, second.where, memory.label)
        if key not in self._found:
            self._found.add(key)
            self.unordered.append(Unordered(first, second, memory.label, nbytes))
