"""A file of hints that the processes of one directory share: uses of keys, changes of places.

        offset           bytes
             0   8 x 65,536  stamps: one per place in a segment, by a hash
       524,288  16 x 1 Mi    uses: 8 bytes of a key and the time of its last use, by its hash
    17,301,504   8 x 4,096   layouts: one per segment, by a hash

A stamp changes when a place is overwritten: it is odd meanwhile and even afterwards. A process
whose copy of a stamp differs reads the place again. A layout changes when a place is made in a
damaged range: places that other processes know there may have other bounds. A process whose copy
differs reads the segment anew. All hints may be lost, stale or damaged. Records are verified
whenever they are read, so a wrong hint costs a read, or a page that is evicted too early. The file
is sparse.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvgraft_storage.files import has_name, open_regular

__all__ = ["NAME", "SharedHints"]

NAME = "kvgraft.uses"
N_STAMPS = 1 << 16
N_USES = 1 << 20
N_LAYOUTS = 1 << 12
MOST_NS = 1 << 62
"""Times later than this, in a hundred years, are damage."""
MANY = 8
"""From this many stamps on, one read of all is cheaper: each read may switch threads."""
_STAMP = struct.Struct("<Q")
_USE = struct.Struct("<8sQ")
_USES_AT = N_STAMPS * _STAMP.size
_LAYOUTS_AT = _USES_AT + N_USES * _USE.size
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class SharedHints:
    """The hints, read and written in place; without a usable file there are none.

    Args:
        directory: the store's directory.

    Attributes:
        seen: this process's copy of the stamps, uint64 `[N_STAMPS]`.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / NAME
        self._fd = -1
        self._last = 0
        self._room = threading.local()
        self.seen: npt.NDArray[np.uint64] = np.zeros(N_STAMPS, np.uint64)
        self.seen = self.stamps()

    def now(self, n: int = 1) -> int:
        """The first of `n` new times, in nanoseconds, later than all before."""
        first = max(time.time_ns(), self._last + 1)
        self._last = first + n
        return first

    def begin_behind(self, used: int) -> None:
        """Make new times later than a recorded use, even if the clock was set back."""
        self._last = max(self._last, min(used, MOST_NS))

    @staticmethod
    def slot(segment: int, offset: int) -> int:
        """Index of a place's stamp."""
        mixed = (segment ^ offset * _MIX) * _MIX & _MASK
        return mixed >> 48

    def stamps(self) -> npt.NDArray[np.uint64]:
        """All stamps as they are now."""
        if self._fd >= 0 and not has_name(self._fd, self._path):
            self.close()
        if self._fd < 0:
            with suppress(OSError):
                self._fd = open_regular(self._path, os.O_RDWR | os.O_CREAT)
        if self._fd < 0:
            return np.array(self.seen)
        stamps = np.zeros(N_STAMPS, np.uint64)
        stamps[:] = np.frombuffer(self._read(_USES_AT, 0), "<u8")
        return stamps

    def stamp(self, slot: int) -> int:
        """One stamp as it is now."""
        if self._fd < 0:
            return int(self.seen[slot])
        return int.from_bytes(self._read(_STAMP.size, slot * _STAMP.size), "little")

    def stamps_of(self, slots: Sequence[int]) -> list[int]:
        """Current values of some stamps: a few are read one by one, more by one read of all."""
        if self._fd < 0 or len(slots) < MANY:
            return [self.stamp(slot) for slot in slots]
        if not hasattr(self._room, "stamps"):
            self._room.stamps = np.zeros(N_STAMPS, "<u8")
        stamps: npt.NDArray[np.uint64] = self._room.stamps
        n_read = 0
        with suppress(OSError):
            n_read = os.preadv(self._fd, [stamps.data], 0)
        stamps[n_read // _STAMP.size :] = 0
        found: list[int] = stamps[slots].tolist()
        return found

    def begin(self, slot: int) -> None:
        """A place is about to be overwritten."""
        self._set_stamp(slot, time.time_ns() | 1)

    def end(self, slot: int) -> None:
        """A place was overwritten or removed."""
        self._set_stamp(slot, (time.time_ns() | 1) + 1)

    def layouts(self) -> npt.NDArray[np.uint64]:
        """All layouts as they are now, uint64 `[N_LAYOUTS]`; see `layout_slot`."""
        return np.frombuffer(self._read(N_LAYOUTS * _STAMP.size, _LAYOUTS_AT), "<u8")

    @staticmethod
    def layout_slot(segment: int) -> int:
        """Index of a segment's layout."""
        return (segment * _MIX & _MASK) >> 52

    def layout(self, segment: int) -> int:
        """A segment's layout as it is now."""
        offset = _LAYOUTS_AT + self.layout_slot(segment) * _STAMP.size
        return int.from_bytes(self._read(_STAMP.size, offset), "little")

    def change_layout(self, segment: int) -> int:
        """Note that a place is about to be made in a segment, or was made; the new layout."""
        changed = max(time.time_ns(), self.layout(segment) + 1) & _MASK
        if self._fd >= 0:
            with suppress(OSError):
                offset = _LAYOUTS_AT + self.layout_slot(segment) * _STAMP.size
                os.pwrite(self._fd, _STAMP.pack(changed), offset)
        return self.layout(segment)

    def last_use(self, key: bytes) -> int:
        """The last recorded use of a key, by any process; 0 if there is none."""
        tag, used = _USE.unpack(self._read(_USE.size, _place(key)))
        return int(used) if tag == key[:8] else 0

    def note(self, uses: Mapping[bytes, int]) -> None:
        """Record uses; takes a microsecond each."""
        if self._fd < 0:
            return
        with suppress(OSError):
            for key, used in uses.items():
                os.pwrite(self._fd, _USE.pack(key[:8], used), _place(key))

    def close(self) -> None:
        """Close the file, which stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _set_stamp(self, slot: int, value: int) -> None:
        self.seen[slot] = value
        if self._fd >= 0:
            with suppress(OSError):
                os.pwrite(self._fd, _STAMP.pack(value), slot * _STAMP.size)

    def _read(self, nbytes: int, offset: int) -> bytes:
        data = b""
        if self._fd >= 0:
            with suppress(OSError):
                data = os.pread(self._fd, nbytes, offset)
        return data.ljust(nbytes, b"\0")


def _place(key: bytes) -> int:
    return _USES_AT + int.from_bytes(key[8:16], "little") % N_USES * _USE.size
