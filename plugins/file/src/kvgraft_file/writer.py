"""Appending to segments, and making room for more of them."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain

from kvgraft import ConfigError
from kvgraft.storage import BLOCK_NBYTES, Counters, Status, Value, round_up
from kvgraft_file.catalog import Catalog
from kvgraft_file.directory import Directory
from kvgraft_file.disk import NO_ROOM, DiskFile
from kvgraft_file.record import Record
from kvgraft_file.segment import Segment
from kvgraft_file.transfer import intact_value, outgoing

__all__ = ["Writer"]

CLAIMED_AT_ONCE = 8
"""Segments locked at a time to make room: each takes a file descriptor."""

CARRIED_SHARE = 2
"""A reclaim carries at most one part in so many of a segment over."""


class Writer:
    """The process's own segment, and the segments that make room for it.

    A segment that is full is left at once, so that the disk always has something to write, and
    sealed when the last write to it has ended.

    The oldest segment without an active writer goes first, also another process's. Records of it
    that this process has read since are carried over, once per read and half a segment at most: a
    second chance that at most doubles the bytes written.

    Args:
        directory: where.
        catalog: known records; changed under `lock`.
        lock: guards the catalog.
        writing: held by the caller; released while the disk works, so that the next write is on
            its way to it when one ends.
        capacity, segment_nbytes: bytes of all segments, and of one.
        counters: where to count.

    Attributes:
        names_unsynced: whether names of segments are to be made durable.
        closed: nothing is written any more.
    """

    def __init__(
        self,
        directory: Directory,
        catalog: Catalog,
        lock: threading.RLock,
        writing: threading.Condition,
        capacity: int,
        segment_nbytes: int,
        counters: Counters,
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._lock = lock
        self._writing = writing
        self._capacity = capacity
        self._segment_nbytes = segment_nbytes
        self._counters = counters
        self._active: Segment | None = None
        self._left: set[Segment] = set()  # full, with writes on their way; guarded by `writing`
        self._n_left_ended = 0
        self.names_unsynced = False
        self.closed = False

    def store(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> list[Status]:
        """Append missing records; a status per key.

        Raises:
            TimeoutError: another process kept the directory's lock for `deadline_s`.
            OSError: the disk failed.
        """
        end = time.monotonic() + deadline_s
        statuses = [Status.OK] * len(keys)
        waiting: dict[bytes, list[int]] = {}
        pending, full = 0, False
        for number, (key, value) in enumerate(zip(keys, values)):
            if key in waiting:
                waiting[key].append(number)
                continue
            if self._is_there(key):
                self._counters.add("kept")
                continue
            size = BLOCK_NBYTES + round_up(value.nbytes)
            if size > self._segment_nbytes - 2 * BLOCK_NBYTES:
                statuses[number] = Status.TOO_LARGE
                continue
            if not self._fits(pending, size):
                self._append(waiting, values, statuses)
                waiting, pending = {}, 0
                if full or not self._make_room(size, end):
                    statuses[number], full = Status.FULL, True
                    continue
            waiting[key] = [number]
            pending += size
        self._append(waiting, values, statuses)
        return statuses

    def release(self, deadline_s: float) -> None:
        """Seal every segment of this process, at the end.

        Raises:
            TimeoutError: writes or another process took longer than `deadline_s`.
        """
        end = time.monotonic() + deadline_s
        self._wait_until(lambda: not self._left and not self._is_coming, end)
        with self._directory.locked(_until(end)):
            self._leave()

    def abandon(self) -> None:
        """Append no more; a write still running seals the segment when it ends."""
        active, self._active = self._active, None
        if active is not None:
            self._left.add(active)
            self._seal_if_ended(active)

    def let_go(self) -> None:
        """Drop the active segment: it was cleared, and there is room."""
        if self._active is not None:
            self._active.file.release()
            self._active = None
        self._n_left_ended += 1
        self._writing.notify_all()

    # -- inside

    def _is_there(self, key: bytes) -> bool:
        with self._lock:
            entry = self._catalog.entries.get(key)
            if entry is None:
                return False
            if entry.segment.file.is_gone:
                self._catalog.drop(entry.segment)
                return key in self._catalog.entries
            self._catalog.unsynced.add(entry.segment)
            return True

    def _fits(self, pending: int, size: int) -> bool:
        """Whether a record fits behind those that wait to be written, and leaves a block free.

        A segment that is full to its last byte could not be told from one that nobody sealed.
        A segment cleared while some wait takes them all the same: they were stored before that.
        """
        if not pending and self._active is not None and self._active.file.is_gone:
            self.let_go()
        active = self._active
        return active is not None and active.tail + pending + size < self._segment_nbytes

    def _make_room(self, size: int, end: float) -> bool:
        """The next segment, or the one after that if carried records leave too little."""
        self._expect_open()
        while not self._begins(size, end):
            if not self._left:
                return False
            ended = self._n_left_ended
            self._wait_until(partial(self._has_ended, ended), end)  # then one more can be evicted
            self._expect_open()
        return True

    def _begins(self, size: int, end: float) -> bool:
        if self._fits(0, size):
            return True
        if not self._roll(end, carry=True):
            return False
        return self._fits(0, size) or (self._roll(end, carry=False) and self._fits(0, size))

    def _has_ended(self, before: int) -> bool:
        return self.closed or self._n_left_ended != before

    def _expect_open(self) -> None:
        if self.closed:
            raise ConfigError(f"storage 'file': {self._directory.path} was closed; open it again")

    def _wait_until(self, ended: Callable[[], bool], end: float) -> None:
        """Let others write until something has ended.

        Raises:
            TimeoutError: it had not at `end`, by the monotonic clock.
        """
        if not self._writing.wait_for(ended, _until(end)):
            raise TimeoutError(errno.ETIMEDOUT, "writes to full segments do not end")

    def _append(
        self, waiting: Mapping[bytes, list[int]], values: Sequence[Value], statuses: list[Status]
    ) -> None:
        if not waiting:
            return
        active = self._active
        assert active is not None
        firsts = [values[numbers[0]] for numbers in waiting.values()]
        payloads = [value.parts for value in firsts]
        records = [
            Record(key, value.nbytes, True, bytes(value.header))
            for key, value in zip(waiting, firsts)
        ]
        try:
            with active.appending(records) as offset:
                pieces = outgoing(active.place(offset), records, payloads)
                self._write(active.file, pieces, offset)
            with self._lock:
                if self._catalog.segments.get(active.header.number) is not active:
                    return  # cleared meanwhile
                for record in records:
                    self._catalog.add(active, offset, record)
                    offset += record.size
                self._catalog.unsynced.add(active)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            for number in chain.from_iterable(waiting.values()):
                statuses[number] = Status.FULL
        finally:
            if active in self._left:
                self._seal_if_ended(active)

    def _write(self, file: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        self._writing.release()
        try:
            file.write(pieces, offset)
        finally:
            self._writing.acquire()
            self._writing.notify_all()

    @property
    def _is_coming(self) -> bool:
        return self._active is not None and bool(self._active.coming)

    def _leave(self) -> None:
        """Append no more to the active segment; under the directory's lock."""
        active, self._active = self._active, None
        if active is None:
            return
        if not active.keys and not active.coming:
            active.unlink()
        self._left.add(active)
        self._seal_if_ended(active)

    def _seal_if_ended(self, left: Segment) -> None:
        """Seal a segment that was left, when the last write to it has ended."""
        if left.coming:
            return
        self._left.discard(left)
        self._n_left_ended += 1
        self._writing.notify_all()
        try:
            left.seal()
        finally:
            left.file.release()

    def _roll(self, end: float, *, carry: bool) -> bool:
        """Begin the next segment; false if there is no room for it."""
        with self._directory.locked(_until(end)):
            self._leave()
            self._directory.remove_unfinished()
            with self._lock:
                self._catalog.refresh()
            carried: list[tuple[bytes, Value]] = []
            try:
                created = self._begin(carried, carry=carry)
            finally:
                with self._lock:
                    self._catalog.retiring.clear()
        if created and carried:
            keys, values = [key for key, _ in carried], [value for _, value in carried]
            self.store(keys, values, _until(end))
            self._counters.add("carried", len(carried))
        return created

    def _begin(self, carried: list[tuple[bytes, Value]], *, carry: bool) -> bool:
        """Evict segments as needed, and begin a segment, of an evicted one's blocks if any.

        Nothing is evicted where that would not make room.
        """
        sizes = self._catalog.sizes()
        surplus = sum(sizes.values()) + self._segment_nbytes - self._capacity
        if surplus > self._evictable(sizes):
            return False
        victims: list[Segment] = []
        with ExitStack() as claims:
            while surplus > 0:
                if len(victims) == CLAIMED_AT_ONCE:
                    self._discard(victims, carried, carry=carry)
                    claims.close()
                    victims = []
                claimed = self._claim(claims)
                if claimed is None:
                    return False
                victims.append(claimed)
                surplus -= sizes.get(claimed.header.number, 0)
            self._discard(victims[:-1], carried, carry=carry)
            for victim in victims[-1:]:
                self._evict(victim, carried, carry=carry)
            if self._create(victims[-1] if victims else None):
                return True
            oldest = self._claim(claims)  # the disk is full
            if oldest is None:
                return False
            self._evict(oldest, carried, carry=carry)
            return self._create(oldest)

    def _evictable(self, sizes: Mapping[int, int]) -> int:
        """Bytes that others do not hold, as far as can be told without claiming them."""
        with self._lock:
            segments = self._catalog.segments.items()
            return sum(sizes.get(number, 0) for number, each in segments if not each.mine)

    def _discard(
        self, victims: Sequence[Segment], carried: list[tuple[bytes, Value]], *, carry: bool
    ) -> None:
        """Evict segments whose blocks are not needed."""
        for victim in victims:
            self._evict(victim, carried, carry=carry)
            victim.unlink()

    def _create(self, old: Segment | None) -> bool:
        directory, nbytes = self._directory, self._segment_nbytes
        number = directory.free_number()
        with self._lock:
            self._catalog.retiring.add(number)  # a refresh meanwhile does not open it
        try:
            if old is None:
                segment = Segment.create(directory.open, directory.path, number, nbytes)
            else:
                segment = Segment.reuse(directory.open, old, number, nbytes)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        segment.file.acquire()  # its locks end when it is closed
        with self._lock:
            self._catalog.segments[number] = segment
        self._active = segment
        self.names_unsynced = True
        return True

    def _claim(self, claims: ExitStack) -> Segment | None:
        """Lock the oldest segment nobody writes to; None if there is none.

        It stays locked, so that no process takes it for an ended writer's, until its name is gone.
        """
        with self._lock:
            for number, segment in sorted(self._catalog.segments.items()):
                if segment.mine or number in self._catalog.retiring:
                    continue
                with suppress(FileNotFoundError), segment.file as file:
                    if file.try_lock():
                        self._catalog.retiring.add(number)
                        claims.enter_context(file)
                        claims.callback(file.unlock)
                        return segment
        return None

    def _evict(self, victim: Segment, carried: list[tuple[bytes, Value]], *, carry: bool) -> None:
        """Drop a claimed segment's records, except those carried over."""
        if carry:
            self._carry(victim, carried)
        with self._lock:
            self._counters.add("evicted", sum(1 for _ in self._catalog.of(victim)))
            self._counters.add("reclaimed")
            self._catalog.drop(victim)

    def _carry(self, segment: Segment, carried: list[tuple[bytes, Value]]) -> None:
        """Read the records that get a second chance; damaged ones do not."""
        room = self._segment_nbytes // CARRIED_SHARE
        room -= sum(BLOCK_NBYTES + round_up(len(value.payload)) for _, value in carried)
        with self._lock:
            used = [(key, entry) for key, entry in self._catalog.of(segment) if entry.used]
        for key, entry in used:
            room -= BLOCK_NBYTES + round_up(entry.nbytes)
            if room < 0:
                return
            value = None
            with suppress(FileNotFoundError), segment.file as file:
                value = intact_value(file, segment.place(entry.offset), key, entry.nbytes)
            if value is not None:
                carried.append((key, value))


def _until(end: float) -> float:
    """Seconds that are left."""
    return max(0.0, end - time.monotonic())
