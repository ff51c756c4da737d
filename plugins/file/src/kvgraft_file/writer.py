"""Appending to segments, and making room for more of them."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from typing import NamedTuple

from kvgraft import ConfigError
from kvgraft_file.catalog import Catalog, Entry
from kvgraft_file.directory import Directory
from kvgraft_file.disk import DISK_ERRORS, NO_ROOM, DiskFile
from kvgraft_file.record import Record
from kvgraft_file.segment import Segment
from kvgraft_file.transfer import intact_value, outgoing
from kvgraft_storage import BLOCK_NBYTES, Counters, Status, Value, round_up

__all__ = ["Writer"]

CLAIMED_AT_ONCE = 8
"""Segments locked at a time to make room: each takes a file descriptor."""

REPLACED_AT_ONCE_NBYTES = 16 << 20
"""Most bytes of records that wait for one overwrite."""

LEFT_ALONE = 2
LEFT_ALONE_S = 10.0
"""At most so many failed places are put last in so many seconds.

Others are tried again at once, so a disk that fails everywhere loses no more records.
"""

FULL_S = 1.0
"""Seconds between two tries to allocate a segment on a full disk."""

CARRIED_SHARE = 2
"""A reclaim carries over at most 1 / n of a segment."""


class _Replacing(NamedTuple):
    """A record that overwrites another one.

    Attributes:
        place: its place, which is taken.
        numbers: indices of its keys in the call.
    """

    place: Entry
    key: bytes
    value: Value
    numbers: list[int]

    @property
    def record(self) -> Record:
        """The record to write."""
        return Record(self.key, self.value.nbytes, True, bytes(self.value.header))

    def follows(self, other: _Replacing) -> bool:
        """Whether it is adjacent to another one."""
        behind = other.place.offset + other.place.size
        return self.place.segment is other.place.segment and self.place.offset == behind


class Writer:
    """Appends to the process's own segment, and makes room.

    A full segment is left at once, so that the disk stays busy, and sealed when its last write has
    ended.

    A store without room for another segment overwrites the least recently used records of the
    needed size, each in its place, of any process. Whole segments are reclaimed only for records of
    another size: if no place has that size, or if all such places were used long after most of
    another segment. Records of that segment that were used since they were written are carried
    over, half a segment at most.

    Args:
        directory: the store's directory.
        catalog: known records; changed under `lock`.
        lock: guards the catalog.
        writing: held by the caller; released during disk writes, so that the next write is
            submitted before one ends.
        capacity, segment_nbytes: bytes of all segments, and of one.
        counters: counts events.

    Attributes:
        names_unsynced: whether the directory must be synced.
        closed: whether writing has ended.
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
        self._left: set[Segment] = set()  # full, with writes in flight; guarded by `writing`
        self._n_left_ended = 0
        self._full_until = 0.0
        self._n_taken = 0  # places that are being overwritten
        self._n_left_alone = 0
        self._left_alone_until = 0.0
        self.names_unsynced = False
        self.closed = False

    def store(
        self, keys: Sequence[bytes], values: Sequence[Value], deadline_s: float
    ) -> list[Status]:
        """Append missing records; a status per key.

        Raises:
            TimeoutError: another process kept the directory's lock for `deadline_s`, or locked
                bytes of this process's segment for a second.
            OSError: the disk failed.
        """
        end = time.monotonic() + deadline_s
        statuses = [Status.OK] * len(keys)
        waiting: dict[bytes, list[int]] = {}
        replacing: dict[bytes, _Replacing] = {}
        pending, full = 0, False
        try:
            for number, (key, value) in enumerate(zip(keys, values)):
                if key in waiting:
                    waiting[key].append(number)
                    continue
                if key in replacing:
                    replacing[key].numbers.append(number)
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
                    place = None if full else self._find_room(size, end)
                    if place is None and not full and not self._fits(0, size):
                        self._replace(replacing, statuses)
                        place = self._ensure_free(size, end)
                    if place is not None:
                        replacing[key] = _Replacing(place, key, value, [number])
                        if self._are_enough(replacing.values()):
                            self._replace(replacing, statuses)
                        continue
                    if not self._fits(0, size):
                        statuses[number], full = Status.FULL, True
                        continue
                waiting[key] = [number]
                pending += size
            self._append(waiting, values, statuses)
        finally:
            self._replace(replacing, statuses)
        with self._lock:
            self._catalog.use(keys[::-1], again=False)
            self._catalog.write_down()
        return statuses

    @staticmethod
    def _are_enough(replacing: Collection[_Replacing]) -> bool:
        """Whether to write the waiting places now; each takes a descriptor."""
        if len({each.place.segment for each in replacing}) >= CLAIMED_AT_ONCE:
            return True
        return sum(each.place.size for each in replacing) >= REPLACED_AT_ONCE_NBYTES

    def release(self, deadline_s: float) -> None:
        """Seal every segment of this process, at the end.

        Raises:
            TimeoutError: writes or another process took longer than `deadline_s`.
        """
        end = time.monotonic() + deadline_s
        self._wait_until(lambda: not (self._left or self._is_coming or self._n_taken), end)
        with self._directory.locked(_until(end)):
            self._leave()

    def abandon(self) -> None:
        """Stop appending; a running write seals the segment when it ends."""
        active, self._active = self._active, None
        if active is not None:
            self._left.add(active)
            self._seal_if_ended(active)

    def let_go(self) -> None:
        """Drop the active segment after a clear, when there is room."""
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
            if not self._catalog.is_current([entry]):
                self._catalog.refresh()
                entry = self._catalog.entries.get(key)
                if entry is None:
                    return False
            self._catalog.unsynced.add(entry.segment)
            self._catalog.use([key])
            return True

    def _fits(self, pending: int, size: int) -> bool:
        """Whether a record fits behind the waiting ones and leaves a block free.

        A segment that is full to its last byte would look like one that was never sealed. A segment
        that is cleared while records wait takes them anyway: they were stored before the clear.
        """
        if not pending and self._active is not None and self._active.file.is_gone:
            self.let_go()
        active = self._active
        return active is not None and active.tail + pending + size < self._segment_nbytes

    def _ensure_free(self, size: int, end: float) -> Entry | None:
        """Take a place to overwrite; None if a segment has room now, or if there is no room at all.

        If carried-over records leave too little of a new segment, another one follows.
        """
        self._expect_open()
        while True:
            place = self._find_room(size, end)
            if place is not None or self._fits(0, size) or not self._left:
                return place
            ended = self._n_left_ended
            self._wait_until(partial(self._has_ended, ended), end)  # then one more can be evicted
            self._expect_open()

    def _find_room(self, size: int, end: float) -> Entry | None:
        for carry in (True, False):
            if self._fits(0, size):
                return None
            if time.monotonic() < self._full_until:
                with self._lock:
                    place = self._take(size)
                if place is not None:
                    return place
            begun, place = self._roll(size, end, carry=carry)
            if not begun:
                return place
        return None

    def _take(self, size: int) -> Entry | None:
        """Take a place of a size, locked and held open: a hole or the least recently used one.

        None if no place of that size can be overwritten now.
        """
        catalog = self._catalog
        for place in catalog.in_holes(size):
            if self._hold(place) and self._make(place):
                return self._taken(place)
        for place in catalog.next_ones(size):
            if self._hold(place):
                self._counters.add("evicted", int(bool(place.key)))
                catalog.take_place(place)
                return self._taken(place)
        return None

    def _hold(self, place: Entry) -> bool:
        """Lock a place, in a segment that stays open, if no process writes to either."""
        segment = place.segment
        if not segment.sealed or segment.header.number in self._catalog.retiring:
            return False
        try:
            segment.file.acquire()
        except FileNotFoundError:
            self._catalog.drop(segment)
            return False
        held = False
        try:
            held = self._mark(place)
        finally:
            if not held:
                segment.file.release()
        return held

    def _make(self, place: Entry) -> bool:
        """Make a place in a hole; releases the segment if that fails."""
        made = False
        try:
            made = self._catalog.take_hole(place)
        finally:
            if not made:
                place.segment.file.unmark(place.offset, place.size)
                place.segment.file.release()
        return made

    def _taken(self, place: Entry) -> Entry:
        place.segment.n_written_over += 1
        self._n_taken += 1
        self._catalog.hints.begin(place.slot)
        return place

    def _mark(self, place: Entry) -> bool:
        """Lock a place if it is unchanged and its segment is still there."""
        file = place.segment.file
        if not file.try_mark(place.offset, place.size):
            return False
        current = False
        try:
            current = self._catalog.is_current([place])
        finally:
            if not current:
                file.unmark(place.offset, place.size)
        return current

    def _replace(self, replacing: dict[bytes, _Replacing], statuses: list[Status]) -> None:
        """Overwrite places with records, adjacent ones by one write; empties `replacing`.

        Among places of one size the first record gets the first place, so that they are read by one
        read later.
        """
        places = sorted((each.place for each in replacing.values()), key=_where)
        of_size = {
            size: iter([place for place in places if place.size == size])
            for size in {place.size for place in places}
        }
        left = [each._replace(place=next(of_size[each.place.size])) for each in replacing.values()]
        left.sort(key=lambda each: _where(each.place))
        replacing.clear()
        try:
            self._replace_all(left, statuses)
        finally:
            for each in left:
                self._give_back(each.place, None)

    def _replace_all(self, left: list[_Replacing], statuses: list[Status]) -> None:
        """Overwrite places with records; records that were not tried stay in the list.

        Raises:
            OSError: the whole disk failed, not only some of the places.
        """
        n_records, faults = len(left), list[OSError]()
        while left:
            run = [left.pop(0)]
            while left and left[0].follows(run[-1]):
                run.append(left.pop(0))
            for each, fault in zip(run, self._replace_run(run)):
                if fault is None:
                    continue
                if fault.errno not in NO_ROOM | DISK_ERRORS:
                    raise fault
                faults.append(fault)
                for number in each.numbers:
                    statuses[number] = Status.FULL if fault.errno in NO_ROOM else Status.DOWN
        if len(faults) == n_records and faults and faults[-1].errno in DISK_ERRORS:
            raise faults[-1]

    def _replace_run(self, run: Sequence[_Replacing]) -> list[OSError | None]:
        """Write adjacent records by one write, or one by one after a failure; the faults."""
        faults: list[OSError | None] = [OSError("was not written")] * len(run)
        try:
            fault = self._fault(run)
            faults = [fault] * len(run)
            if fault is not None and fault.errno in DISK_ERRORS and len(run) > 1:
                faults = [self._fault([each]) for each in run]
        finally:
            for each, fault in zip(run, faults):
                self._settle(each, fault)
        return faults

    def _fault(self, run: Sequence[_Replacing]) -> OSError | None:
        """Write adjacent records by one write; the error if that fails."""
        first = run[0].place
        pieces = outgoing(
            first.segment.place(first.offset),
            [each.record for each in run],
            [each.value.parts for each in run],
        )
        try:
            self._write(first.segment.file, pieces, first.offset)
        except OSError as error:
            return error
        return None

    def _settle(self, each: _Replacing, fault: OSError | None) -> None:
        """Give a place back after a write or a failure.

        A place that failed is tried again after all others of its size, so that it does not block
        them. If failures are many, places keep their order, so a disk that fails everywhere does
        not cost all other records.
        """
        place = each.place
        if fault is None:
            self._give_back(place, each.record)
            return
        with suppress(OSError):
            place.segment.mark_removed(place.offset, each.record)
        self._give_back(place, None)
        if fault.errno in DISK_ERRORS and self._may_leave_alone():
            with self._lock:
                self._catalog.leave_alone(place)

    def _may_leave_alone(self) -> bool:
        """Count a failed place; whether there were few recently."""
        now = time.monotonic()
        if now >= self._left_alone_until:
            self._n_left_alone, self._left_alone_until = 0, now + LEFT_ALONE_S
        self._n_left_alone += 1
        return self._n_left_alone <= LEFT_ALONE

    def _give_back(self, place: Entry, record: Record | None) -> None:
        """Put a taken place back with its record, or empty."""
        segment = place.segment
        with self._lock:
            self._catalog.hints.end(place.slot)
            segment.file.unmark(place.offset, place.size)
            segment.n_written_over -= 1
            if self._catalog.segments.get(segment.header.number) is segment:
                self._catalog.put(place, record)
                self._catalog.unsynced.add(segment)
        segment.file.release()
        self._n_taken -= 1
        self._writing.notify_all()

    def _has_ended(self, before: int) -> bool:
        return self.closed or self._n_left_ended != before

    def _expect_open(self) -> None:
        if self.closed:
            raise ConfigError(f"storage 'file': {self._directory.path} was closed; open it again")

    def _wait_until(self, ended: Callable[[], bool], end: float) -> None:
        """Release `writing` until a condition holds.

        Raises:
            TimeoutError: it did not hold at `end`, by the monotonic clock.
        """
        if not self._writing.wait_for(ended, _until(end)):
            raise TimeoutError(errno.ETIMEDOUT, "writes to full segments do not end")

    def _append(
        self,
        waiting: Mapping[bytes, list[int]],
        values: Sequence[Value],
        statuses: list[Status],
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
        """Stop appending to the active segment; under the directory's lock."""
        active, self._active = self._active, None
        if active is None:
            return
        if not active.places and not active.coming:
            active.unlink()
        self._left.add(active)
        self._seal_if_ended(active)

    def _seal_if_ended(self, left: Segment) -> None:
        """Seal a left segment if its last write has ended."""
        if left.coming:
            return
        self._left.discard(left)
        self._n_left_ended += 1
        self._writing.notify_all()
        try:
            left.seal()
        finally:
            left.file.release()

    def _roll(self, size: int, end: float, *, carry: bool) -> tuple[bool, Entry | None]:
        """Begin the next segment, or find a place to overwrite; whether one began, and the place.

        Without either there is no room.
        """
        with self._directory.locked(_until(end)):
            self._leave()
            self._directory.remove_unfinished()
            with self._lock:
                self._catalog.refresh()
                victim, place = self._choose(size)
            if place is not None:
                self._full_until = time.monotonic() + FULL_S
                return False, place
            carried: list[tuple[bytes, Value]] = []
            try:
                created = self._begin(size, carried, victim, carry=carry)
            finally:
                with self._lock:
                    self._catalog.retiring.clear()
            if not created:
                with self._lock:
                    place = self._take(size)
                self._full_until = time.monotonic() + FULL_S
                return False, place
        if carried:
            keys, values = [key for key, _ in carried], [value for _, value in carried]
            self.store(keys, values, _until(end))
            self._counters.add("carried", len(carried))
        return True, None

    def _choose(self, size: int) -> tuple[Segment | None, Entry | None]:
        """The segment to reclaim first, or a place to overwrite; neither while there is room."""
        nbytes = sum(self._catalog.sizes().values())
        if not self._capacity - self._segment_nbytes < nbytes <= self._capacity:
            return None, None
        victim = self._stale_segment(size)
        return victim, self._take(size) if victim is None else None

    def _stale_segment(self, size: int) -> Segment | None:
        """A segment whose records were mostly used before all of a size; None if there is none."""
        oldest = next((each.used for each in self._catalog.shelves.get(size, ()) if each.key), None)
        if oldest is None:
            return None
        stale: Counter[Segment] = Counter()
        for other, shelf in self._catalog.shelves.items():
            if other == size:
                continue
            for place in shelf:
                if place.key and place.used >= oldest:
                    break
                if place.segment.sealed:
                    stale[place.segment] += other
        for segment, nbytes in stale.most_common(1):
            if 2 * nbytes >= self._segment_nbytes:
                return segment
        return None

    def _begin(
        self,
        size: int,
        carried: list[tuple[bytes, Value]],
        first: Segment | None,
        *,
        carry: bool,
    ) -> bool:
        """Begin a segment; evicts others as needed and reuses the blocks of one.

        Nothing is evicted if that would not make room.
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
                claimed = self._claim(claims, first)
                if claimed is None:
                    return False
                victims.append(claimed)
                surplus -= sizes.get(claimed.header.number, 0)
            self._discard(victims[:-1], carried, carry=carry)
            for victim in victims[-1:]:
                self._evict(victim, carried, carry=carry)
            if self._create(victims[-1] if victims else None):
                return True
            if not victims and self._catalog.shelves.get(size):
                return False  # the disk is full, and a place can be overwritten
            oldest = self._claim(claims)
            if oldest is None:
                return False
            self._evict(oldest, carried, carry=carry)
            return self._create(oldest)

    def _evictable(self, sizes: Mapping[int, int]) -> int:
        """Bytes of segments that others do not hold, without claiming them."""
        with self._lock:
            segments = self._catalog.segments.items()
            return sum(sizes.get(number, 0) for number, each in segments if not each.mine)

    def _discard(
        self, victims: Sequence[Segment], carried: list[tuple[bytes, Value]], *, carry: bool
    ) -> None:
        """Evict segments without reusing their blocks."""
        for victim in victims:
            self._evict(victim, carried, carry=carry)
            victim.unlink()

    def _create(self, old: Segment | None) -> bool:
        directory, nbytes = self._directory, self._segment_nbytes
        number = directory.free_number()
        with self._lock:
            self._catalog.retiring.add(number)  # so that a concurrent refresh does not open it
        try:
            if old is None:
                segment = Segment.create(directory.open, directory.path, number, nbytes)
            else:
                segment = Segment.reuse(directory.open, old, number, nbytes)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        segment.file.acquire()  # closing it ends its locks
        with self._lock:
            segment.layout = self._catalog.hints.layout(number)
            self._catalog.segments[number] = segment
        self._active = segment
        self.names_unsynced = True
        return True

    def _claim(self, claims: ExitStack, first: Segment | None = None) -> Segment | None:
        """Lock the least recently used segment without a writer; None if there is none.

        `first` is tried first. The segment stays locked until its name is gone, so that no process
        takes it for one whose writer died.
        """
        with self._lock:
            segments = sorted(self._catalog.segments.values(), key=_mean_use)
            segments.sort(key=lambda segment: segment is not first)
            for segment in segments:
                number = segment.header.number
                if segment.mine or segment.n_written_over or number in self._catalog.retiring:
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
        """Read the records that get a second chance; damaged ones are left out."""
        room = self._segment_nbytes // CARRIED_SHARE
        room -= sum(BLOCK_NBYTES + round_up(value.nbytes) for _, value in carried)
        with self._lock:
            again = [each for each in self._catalog.of(segment) if each.again]
        again.sort(key=lambda each: -each.used)
        for entry in again:
            room -= entry.size
            if room < 0:
                return
            key = entry.key
            value = None
            with suppress(FileNotFoundError), segment.file as file:
                value = intact_value(file, segment.place(entry.offset), key, entry.nbytes)
            if value is not None:
                carried.append((key, value))


def _until(end: float) -> float:
    """Seconds that are left until `end`."""
    return max(0.0, end - time.monotonic())


def _where(place: Entry) -> tuple[int, int]:
    """Sort key: the number of a place's segment, and the offset."""
    return place.segment.header.number, place.offset


def _mean_use(segment: Segment) -> tuple[float, int]:
    """The mean last use of a segment's records, empty places as never used; then its age."""
    places = segment.places.values()
    mean = sum(place.used for place in places) / len(places) if places else 0.0
    return mean, segment.header.number
