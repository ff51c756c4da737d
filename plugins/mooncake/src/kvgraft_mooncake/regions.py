"""Memory that the client library may read and write, registered once.

`Storage` hands out parts of the same few mapped regions. They are registered at their first use and
kept until the end, and values in them need no copy. Values in other memory are copied through a
region of this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from mmap import mmap

import numpy as np

from kvgraft_storage import HEADER_NBYTES, Value, aligned, gather

__all__ = ["Regions", "address_of", "give_back"]


def address_of(view: memoryview | mmap) -> int:
    """The address of a buffer."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)


class Regions:
    """Registered memory.

    Args:
        register: called with address and length of a region; raises if it cannot be registered.
    """

    def __init__(self, register: Callable[[int, int], None]) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._known: dict[int, mmap] = {}
        self._lent: dict[int, int] = {}  # memory of callers: first address and end
        self._own = memoryview(b"")
        self._own_in_use = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    @property
    def addresses(self) -> list[int]:
        """First addresses of the regions."""
        return [*self._known, *self._lent]

    def add(self, memory: memoryview) -> None:
        """Register a caller's memory; values in it need no copy."""
        start = address_of(memory)
        self._register(start, len(memory))
        with self._lock:
            self._lent[start] = start + len(memory)

    def remove(self, memory: memoryview) -> int | None:
        """Forget a caller's memory; returns its address, None if it is not registered."""
        start = address_of(memory)
        with self._lock:
            return None if self._lent.pop(start, None) is None else start

    @contextmanager
    def at_home(self, values: Sequence[Value]) -> Iterator[Sequence[Value]]:
        """The same values if they are in registered memory, else copies in our own."""
        views = [view for value in values for view in (value.header, *value.parts)]
        others = [view for view in views if not self._is_lent(view)]
        regions = [_region(view) for view in others]
        if None not in regions:
            self._ensure(regions)
            yield values
            return
        with self.room([value.nbytes for value in values]) as copies:
            give_back(values, copies)
            yield copies

    @contextmanager
    def room(self, nbytes: Sequence[int]) -> Iterator[list[Value]]:
        """Our own memory for payloads of these lengths; for one caller at a time."""
        needed = sum(nbytes) + HEADER_NBYTES * len(nbytes)
        with self._own_in_use:
            if needed > len(self._own):
                self._own = aligned(max(needed, 2 * len(self._own)))
            values, start = [], 0
            for length in nbytes:
                middle = start + HEADER_NBYTES
                values.append(Value(self._own[start:middle], self._own[middle : middle + length]))
                start = middle + length
            self._ensure([_region(value.payload) for value in values])
            yield values

    def _is_lent(self, view: memoryview) -> bool:
        if not self._lent:
            return False
        first = address_of(view)
        with self._lock:
            return any(
                start <= first and first + len(view) <= end for start, end in self._lent.items()
            )

    def _ensure(self, regions: Sequence[mmap | None]) -> None:
        with self._lock:
            for region in regions:
                if region is None or any(region is each for each in self._known.values()):
                    continue
                address = address_of(region)
                self._register(address, len(region))
                self._known[address] = region


def give_back(values: Sequence[Value], to: Sequence[Value]) -> None:
    """Copy values to the caller's memory, unless they are there."""
    for value, target in zip(values, to):
        if target is not value:
            target.header[:] = value.header
            gather(target.payload, value.parts)


def _region(view: memoryview) -> mmap | None:
    """The mapping that contains a buffer."""
    return view.obj if isinstance(view.obj, mmap) else None
