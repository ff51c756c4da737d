"""Appending to segments and making room for more of them; one thread at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvgraft.storage.backend import Value
from kvgraft.storage.counters import Counters
from kvgraft.storage.file.catalog import Catalog, Entry
from kvgraft.storage.file.directory import Directory
from kvgraft.storage.file.disk import NO_ROOM, TruncatedRead
from kvgraft.storage.file.segment import Segment
from kvgraft.storage.file.transfer import Incoming, Outgoing
from kvgraft.storage.memory import BLOCK_NBYTES, aligned, round_up
from kvgraft.storage.payload import HEADER_NBYTES, damage
from kvgraft.storage.status import Status

__all__ = ["Writer"]

CARRIED_SHARE = 2
"""A reclaim carries at most one part in so many of a segment over."""


class Writer:
    """The process's own segment, and the segments that make room for it.

    The oldest segment that nobody writes to goes first, whoever wrote it. Records of it that this
    process has read since are carried over, once per read and half a segment at most: a second
    chance that at most doubles what is written.

    Args:
        directory: where.
        catalog: what is known; changed under `lock`.
        lock: guards the catalog.
        capacity, segment_nbytes: bytes of all segments, and of one.
        counters: where to count.

    Attributes:
        unsynced: segments with records that are not durable yet.
    """

    def __init__(
        self,
        directory: Directory,
        catalog: Catalog,
        lock: threading.RLock,
        capacity: int,
        segment_nbytes: int,
        counters: Counters,
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._lock = lock
        self._capacity = capacity
        self._segment_nbytes = segment_nbytes
        self._counters = counters
        self._active: Segment | None = None
        self.unsynced: set[Segment] = set()
        self.names_unsynced = False

    def store(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> list[Status]:
        """Append what is not there yet; a status per key.

        Raises:
            TimeoutError: another process kept the directory's lock for `deadline_s`.
            OSError: the disk failed.
        """
        statuses = [Status.OK] * len(keys)
        waiting: dict[bytes, tuple[int, Outgoing]] = {}
        room_asked = False
        for number, (key, value) in enumerate(zip(keys, values)):
            if key in waiting or self._is_there(key):
                self._counters.add("kept")
                continue
            size = BLOCK_NBYTES + round_up(len(value.payload))
            if size > self._segment_nbytes - BLOCK_NBYTES:
                statuses[number] = Status.TOO_LARGE
                continue
            pending = sum(out.record.size for _, out in waiting.values())
            if not self._fits(pending + size):
                self._append(waiting, statuses)
                waiting, pending = {}, 0
                if (room_asked and self._active is None) or not self._roll(deadline_s):
                    statuses[number], room_asked = Status.FULL, True
                    continue
                if not self._fits(size):  # what was carried over left less
                    self._roll(deadline_s, carry=False)
            active = self._active
            assert active is not None
            out = Outgoing(key, value, active.place(active.tail + pending))
            waiting[key] = (number, out)
        self._append(waiting, statuses)
        return statuses

    def release(self, deadline_s: float) -> None:
        """Seal the active segment, at the end."""
        with self._directory.locked(deadline_s):
            self._seal()

    def let_go(self) -> None:
        """Forget the active segment: it was cleared."""
        if self._active is not None:
            self._active.file.let_go()
            self._active = None

    # -- inside

    def _is_there(self, key: bytes) -> bool:
        with self._lock:
            entry = self._catalog.entries.get(key)
            if entry is None:
                return False
            if entry.segment.file.is_unlinked:
                self._catalog.drop(entry.segment)
                return key in self._catalog.entries
            self.unsynced.add(entry.segment)
            return True

    def _fits(self, nbytes: int) -> bool:
        active = self._active
        if active is None or active.file.is_unlinked:
            self.let_go()
            return False
        return active.tail + nbytes <= self._segment_nbytes

    def _append(self, waiting: dict[bytes, tuple[int, Outgoing]], statuses: list[Status]) -> None:
        if not waiting:
            return
        active = self._active
        assert active is not None
        outgoing = [out for _, out in waiting.values()]
        offset = active.tail
        try:
            active.append([piece for out in outgoing for piece in out.pieces])
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            for number, _ in waiting.values():
                statuses[number] = Status.FULL
            return
        with self._lock:
            for out in outgoing:
                self._catalog.add(active, offset, out.record)
                offset += out.record.size
            self.unsynced.add(active)

    def _seal(self) -> None:
        if self._active is None:
            return
        self._active.seal()
        self.let_go()

    def _roll(self, deadline_s: float, *, carry: bool = True) -> bool:
        """Begin the next segment; false if there is no room for it."""
        with self._directory.locked(deadline_s):
            self._seal()
            self._directory.remove_unfinished()
            with self._lock:
                self._catalog.refresh()
            carried: list[tuple[bytes, Value]] = []
            while self._nbytes() + self._segment_nbytes > self._capacity:
                if not self._reclaim(carried, carry=carry):
                    return False
            created = self._create() or (self._reclaim(carried, carry=carry) and self._create())
        if created and carried:
            keys, values = [key for key, _ in carried], [value for _, value in carried]
            self.store(keys, values, deadline_s)
            self._counters.add("carried", len(carried))
        return created

    def _create(self) -> bool:
        number = max([0, *(number for number, _, _ in self._directory.segments())]) + 1
        try:
            segment = Segment.create(
                self._directory.path, number, self._segment_nbytes, direct=self._directory.direct
            )
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        with self._lock:
            self._catalog.segments[number] = segment
        segment.file.__enter__()  # others may clear it, and the catalog let go of it
        self._active = segment
        self.names_unsynced = True
        return True

    def _nbytes(self) -> int:
        known = self._catalog.segments
        return sum(size for number, _, size in self._directory.segments() if number in known)

    def _reclaim(self, carried: list[tuple[bytes, Value]], *, carry: bool) -> bool:
        """Evict the oldest segment nobody writes to; false if there is none."""
        for _, segment in sorted(self._catalog.segments.items()):
            if segment is self._active or not segment.file.try_lock():
                continue
            segment.file.unlock()
            if carry:
                self._carry(segment, carried)
            segment.unlink()
            with self._lock:
                n_keys = sum(1 for _ in self._catalog.of(segment))
                self._counters.add("evicted", n_keys)
                self._counters.add("reclaimed")
                self.unsynced.discard(segment)
                self._catalog.drop(segment)
            return True
        return False

    def _carry(self, segment: Segment, carried: list[tuple[bytes, Value]]) -> None:
        """Read what deserves a second chance; what is damaged does not."""
        room = self._segment_nbytes // CARRIED_SHARE
        room -= sum(BLOCK_NBYTES + round_up(len(value.payload)) for _, value in carried)
        with self._lock:
            used = [(key, entry) for key, entry in self._catalog.of(segment) if entry.used]
        for key, entry in used:
            room -= BLOCK_NBYTES + round_up(entry.nbytes)
            if room < 0:
                return
            value = _read(key, entry)
            if value is not None:
                carried.append((key, value))


def _read(key: bytes, entry: Entry) -> Value | None:
    value = Value(memoryview(bytearray(HEADER_NBYTES)), aligned(entry.nbytes)[: entry.nbytes])
    incoming = Incoming(value)
    try:
        entry.segment.file.read(incoming.pieces, entry.offset)
    except TruncatedRead:
        return None
    whole = incoming.finish(key, entry.segment.place(entry.offset)) is Status.OK
    return value if whole and damage(key, value.header, value.payload) is None else None
