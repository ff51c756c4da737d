"""This process's view of a store: its segments, the places in them, and the place of each key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count, islice
from pathlib import Path

import numpy as np

from kvgraft_file.directory import Directory
from kvgraft_file.disk import DISK_ERRORS
from kvgraft_file.record import Record
from kvgraft_file.segment import Segment
from kvgraft_file.shared_hints import SharedHints
from kvgraft_file.transfer import is_whole
from kvgraft_storage import BLOCK_NBYTES, Change, EventLog

__all__ = ["Catalog", "Entry"]

PLACES_TRIED = 256
"""Most places that are tried before one can be overwritten."""

PLACES_LOOKED_AT = 16 * PLACES_TRIED
"""Most places whose uses by other processes are looked up for it, which takes some milliseconds."""

NOTED = 8192
NOTED_NS = 1_000_000_000
"""Uses are written to the shared hints when there are so many, or after so many nanoseconds."""


class Entry:
    """A place for a record in a segment.

    Attributes:
        segment: the segment it is in.
        offset: of its block there.
        size: bytes in the segment; it takes records of this size only.
        slot: index of its stamp, see `SharedHints`.
        key: key of the record in it; empty if there is none.
        nbytes: payload length of the record.
        used: last use of the record that this process knows.
        again: whether it was used since it was written, or since a reclaim last spared it.
    """

    __slots__ = ("again", "key", "nbytes", "offset", "segment", "size", "slot", "used")

    def __init__(self, segment: Segment, offset: int, size: int) -> None:
        self.segment = segment
        self.offset = offset
        self.size = size
        self.slot = SharedHints.slot(segment.header.number, offset)
        self.key = b""
        self.nbytes = 0
        self.used = 0
        self.again = False


class Catalog:
    """Keys, places and segments, found by reading segments; the caller locks.

    Attributes:
        entries: the place of each key.
        copies: further places of keys, because two processes stored them or a reclaim carried them
            over.
        shelves: places by size, in the order in which they are overwritten: empty ones and copies,
            then the least recently used.
        segments: by number; this process's own among them.
        foreign: files that are named like segments and are none.
        damaged: segments with holes, in the order in which they were found.
        unsynced: segments with records that `flush` has to make durable.
        events: gets added and removed keys; None without a listener.
        retiring: numbers of segments that this process is about to reclaim or to begin; a refresh
            ignores them.
        hints: shared with other processes.
    """

    def __init__(self, directory: Directory) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.copies: dict[bytes, list[Entry]] = {}
        self.shelves: dict[int, OrderedDict[Entry, None]] = {}
        self.segments: dict[int, Segment] = {}
        self.foreign: list[Path] = []
        self.damaged: dict[Segment, None] = {}
        self.unsynced: set[Segment] = set()
        self.retiring: set[int] = set()
        self.events: EventLog | None = None
        self.hints = SharedHints(directory.path)
        self._by_slot: dict[int, list[Entry]] = {}
        self._late: dict[int, list[tuple[int, int, Entry]]] = {}
        self._numbers = count()
        self._directory = directory
        self._noted: dict[bytes, int] = {}
        self._noted_at = self.hints.now()
        self._sorted = False

    def refresh(self) -> None:
        """Read other processes' records, reclaimed segments and clears.

        Raises:
            OSError: the directory or a segment cannot be read.
        """
        listed = {each.number: each.inode for each in self._directory.segments()}
        for number, segment in list(self.segments.items()):
            if listed.get(number) != segment.file.inode and segment.file.is_gone:
                self.drop(segment)
        self.foreign = []
        layouts, reads_anew = self.hints.layouts(), False
        for number in sorted(listed.keys() - self.retiring):
            known = self.segments.get(number)
            if known is None:
                path = self._directory.segment_path(number)
                try:
                    known = Segment.open(self._directory.open, path, number)
                except FileNotFoundError:  # reclaimed after it was listed
                    continue
                if known is None:
                    self.foreign.append(path)
                    continue
                self.segments[number] = known
            layout = int(layouts[self.hints.layout_slot(number)])
            used: dict[bytes, int] = {}
            if known.mine:
                known.layout = layout
            elif known.layout != layout and not known.n_written_over:
                used = {each.key: each.used for each in known.places.values() if each.key}
                self.remove(*known.places.values())
                known.rewind()
                known.layout, reads_anew = layout, True
            try:
                for offset, record in known.news():
                    self.add(known, offset, record, used.get(record.key))
            except FileNotFoundError:  # reclaimed, and this process had it closed
                self.drop(known)
                continue
            self._note_holes(known)
        if reads_anew:
            self.sort()
        self.look_again()

    def sort(self) -> None:
        """Order the shelves by the recorded uses; later uses get later times.

        A record without a recorded use is as old as its segment. Among those, the last ones of a
        segment come first, because they are the ends of sequences.
        """
        self._sorted = True
        for shelf in self.shelves.values():
            order = sorted(shelf, key=lambda place: (place.used, -place.offset))
            for place in order:
                shelf.move_to_end(place)
            self.hints.begin_behind(order[-1].used if order else 0)

    def next_ones(self, size: int) -> Iterator[Entry]:
        """Some places of a size, in the order of overwriting; uses by other processes count.

        If other processes used all of them, there is none. A segment is reclaimed then, if that
        makes room.
        """
        #   shelf   in front ── by this process's uses ── used by others since: moved here
        #   late    those moved, by their use: older ones of them go before the next in front
        shelf = self.shelves.get(size, OrderedDict[Entry, None]())
        late = self._late.setdefault(size, [])
        if len(late) > 2 * len(shelf) + PLACES_TRIED:
            late[:] = sorted(each for each in late if each[0] == each[2].used and each[2] in shelf)
        n_tried = 0
        for place in list(islice(shelf, PLACES_LOOKED_AT)):
            if place not in shelf:
                continue  # its segment was dropped
            if self._was_used(place):
                shelf.move_to_end(place)
                heappush(late, (place.used, next(self._numbers), place))
                continue
            for _ in range(PLACES_TRIED):
                if not late or late[0][0] >= place.used:
                    break
                used, _, other = heappop(late)
                if other not in shelf or other.used != used:
                    continue  # it was used here, or holds something else
                if self._was_used(other):
                    heappush(late, (other.used, next(self._numbers), other))
                    continue
                yield other
            yield place
            n_tried += 1
            if n_tried == PLACES_TRIED:
                return

    def _was_used(self, place: Entry) -> bool:
        """Whether another process used a place since this one read its use; records that use."""
        used = self.hints.last_use(place.key) if place.key else 0
        if used <= place.used:
            return False
        place.used = used
        return True

    def sizes(self) -> dict[int, int]:
        """Bytes that count against the capacity, per segment, at most its declared length."""
        sizes = {}
        for number, nbytes, _ in self._directory.segments():
            known = self.segments.get(number)
            sizes[number] = nbytes if known is None else min(nbytes, known.header.capacity)
        return sizes

    # -- records

    def add(self, segment: Segment, offset: int, record: Record, used: int | None = None) -> None:
        """Add a place with its record; of several places of one key, the first known is read."""
        place = Entry(segment, offset, record.size)
        self._enter(place)
        self.put(place, record, used)

    def _enter(self, place: Entry) -> None:
        place.segment.places[place.offset] = place
        self._by_slot.setdefault(place.slot, []).append(place)

    def put(self, place: Entry, record: Record | None, used: int | None = None) -> None:
        """Put a place with its current record on a shelf.

        Args:
            place: a place that its segment knows and that is on no shelf.
            record: its record; None or a removed one if it is empty.
            used: its last use; None for the recorded use. Without any, it is new, or as old as its
                segment if the store was just opened.
        """
        shelf = self.shelves.setdefault(place.size, OrderedDict())
        shelf[place] = None
        place.key, place.nbytes, place.used, place.again = b"", 0, 0, False
        if record is None or not record.live:
            shelf.move_to_end(place, last=False)
            return
        place.key, place.nbytes = record.key, record.nbytes
        place.used = (
            self.hints.last_use(record.key) or self._default(place) if used is None else used
        )
        if self.entries.setdefault(record.key, place) is not place:
            self.copies.setdefault(record.key, []).append(place)
            shelf.move_to_end(place, last=False)
        else:
            self._log(Change.STORED, [record.key])

    def _default(self, place: Entry) -> int:
        return self.hints.now() if self._sorted else place.segment.header.number

    def use(self, keys: Sequence[bytes], *, again: bool = True) -> None:
        """Record a use of known keys, the last one as the most recent; or that they are new."""
        first = self.hints.now(len(keys))
        for used, key in enumerate(keys, first):
            place = self.entries.get(key)
            if place is not None and place in (shelf := self.shelves[place.size]):
                shelf.move_to_end(place)
                place.used = used
                place.again |= again
                self._noted[key] = used

    def write_down(self, *, at_once: bool = False) -> None:
        """Write recorded uses to the shared hints, about once a second."""
        if not self._noted:
            return
        now = self.hints.now()
        if at_once or len(self._noted) >= NOTED or now - self._noted_at >= NOTED_NS:
            noted, self._noted, self._noted_at = self._noted, {}, now
            self.hints.note(noted)

    def forget(self, key: bytes, place: Entry) -> None:
        """Drop the record of a place; another one of its key takes over if there is one."""
        if self._forget(key, place):
            self._log(Change.REMOVED, [key])
        place.key, place.used = b"", 0
        shelf = self.shelves[place.size]
        if place in shelf:
            shelf.move_to_end(place, last=False)

    def _forget(self, key: bytes, place: Entry) -> bool:
        """Drop one place of a key; returns whether that was the last one."""
        others = self.copies.pop(key, [])
        if self.entries.get(key) is place:
            del self.entries[key]
            if others:
                self.entries[key] = others.pop(0)
            else:
                return True
        else:
            others = [other for other in others if other is not place]
        if others:
            self.copies[key] = others
        return False

    def take(self, key: bytes) -> list[Entry]:
        """Drop a key; returns all its places, off the shelves until they are `put` back."""
        first = self.entries.pop(key, None)
        places = [] if first is None else [first, *self.copies.pop(key, [])]
        for place in places:
            place.key = b""
            self.shelves[place.size].pop(place, None)
        if places:
            self._log(Change.REMOVED, [key])
        return places

    def put_back(self, places: Iterable[Entry]) -> None:
        """Put back places whose records were removed, unless their segments were dropped."""
        for place in places:
            if place.segment.places.get(place.offset) is place:
                self.put(place, None)

    def take_place(self, place: Entry) -> None:
        """Evict the record of a place, and take the place off its shelf until it is `put` back."""
        del self.shelves[place.size][place]
        if place.key:
            if self._forget(place.key, place):
                self._log(Change.EVICTED, [place.key])
            place.key = b""

    def leave_alone(self, place: Entry) -> None:
        """Move an empty place to the end of its shelf, unless it was dropped."""
        shelf = self.shelves[place.size]
        if place in shelf:
            place.used = self.hints.now()
            shelf.move_to_end(place)

    def in_holes(self, size: int) -> Iterator[Entry]:
        """Places of a size that can be made in holes, one per hole; `take_hole` makes one."""
        for segment in list(self.damaged):
            for start, end in list(segment.holes):
                if end - start >= size:
                    yield Entry(segment, start, size)

    def take_hole(self, place: Entry) -> bool:
        """Make a place in a hole, on no shelf until it is `put` there; locks its bytes.

        If the disk cannot read or write there, the hole is not used again until the segment is read
        anew. Otherwise every record that fits would try it first, and fail.

        Returns:
            False if another process stored a record there, which is then added; if the disk fails;
            and if another process makes a place in the same segment, or made one since this process
            read it.

        Raises:
            OSError: the whole disk failed, not only this place; the hole is kept.
        """
        segment = place.segment
        if not segment.file.try_mark(0, BLOCK_NBYTES):
            return False
        try:
            return self.is_current([place]) and self._make_place(place)
        finally:
            segment.file.unmark(0, BLOCK_NBYTES)

    def _make_place(self, place: Entry) -> bool:
        segment, start = place.segment, place.offset
        hole = next(each for each in segment.holes if each[0] == start)
        record = None
        try:
            found = segment.next_record(start, start + place.size)
            if found is None:
                self._change_layout(place)
            else:
                record = segment.read(found, end=hole[1])
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            segment.holes.remove(hole)
            self._note_holes(segment)
            return False
        segment.holes.remove(hole)
        if found is None:
            self._enter(place)
            segment.add_hole(start + place.size, hole[1])
        elif record is not None:
            self.add(segment, found, record)
            segment.add_hole(start, found)
            segment.add_hole(found + record.size, hole[1])
        self._note_holes(segment)
        return found is None

    def _change_layout(self, place: Entry) -> None:
        """Bump the layout before a change, for other writers, and after it, for other readers."""
        segment = place.segment
        self.hints.change_layout(segment.header.number)
        try:
            segment.make_place(place.offset, place.size)
        finally:
            segment.layout = self.hints.change_layout(segment.header.number)

    def _note_holes(self, segment: Segment) -> None:
        if segment.holes:
            self.damaged[segment] = None
        else:
            self.damaged.pop(segment, None)

    def _log(self, change: Change, keys: Sequence[bytes]) -> None:
        if self.events is not None:
            self.events.add(change, keys)

    def drop(self, segment: Segment) -> None:
        """Release a segment with all its records."""
        self.unsynced.discard(segment)
        self.damaged.pop(segment, None)
        self.remove(*segment.places.values())
        if self.segments.get(segment.header.number) is segment:
            del self.segments[segment.header.number]
            segment.file.let_go()

    def remove(self, *places: Entry) -> None:
        """Remove places; the records in them are evicted."""
        gone = []
        for place in places:
            if place.key and self._forget(place.key, place):
                gone.append(place.key)
            place.key = b""
            self.shelves[place.size].pop(place, None)
            self._leave_out(place)
            del place.segment.places[place.offset]
        self._log(Change.EVICTED, gone)

    def _leave_out(self, place: Entry) -> None:
        beside = self._by_slot[place.slot]
        beside.remove(place)
        if not beside:
            del self._by_slot[place.slot]

    def of(self, segment: Segment) -> Iterator[Entry]:
        """A segment's places whose records are in use, ordered by offset."""
        for _, place in sorted(segment.places.items()):
            if place.key and self.entries.get(place.key) is place:
                yield place

    # -- other processes

    def is_current(self, places: Collection[Entry]) -> bool:
        """Whether no other process overwrote a place since this one looked.

        New places in holes count, too.
        """
        layout, slots = self.hints.layout, [place.slot for place in places]
        return self.hints.stamps_of(slots) == self.hints.seen[slots].tolist() and all(
            layout(segment.header.number) == segment.layout
            for segment in {place.segment for place in places}
        )

    def look_again(self) -> None:
        """Read the blocks of places that other processes have overwritten.

        An odd stamp is a write under way, or a process that ended during one.
        """
        now = self.hints.stamps()
        odd = now & np.uint64(1) == 1  # numpy 1 takes no int beside uint64
        for slot in np.flatnonzero((now != self.hints.seen) | odd).tolist():
            settled, places = True, list(self._by_slot.get(slot, ()))
            for place in places:
                settled = self._reread(place, torn=bool(odd[slot])) and settled
            if settled:
                self.hints.seen[slot] = now[slot]
                if odd[slot] and places:  # else only other processes know the place
                    self.hints.end(slot)

    def _reread(self, place: Entry, *, torn: bool) -> bool:
        """Read the current record of a place; false if a process writes there, or if it is gone."""
        segment = place.segment
        if place not in self.shelves[place.size]:
            return False  # this process writes there
        record = None
        try:
            with segment.file as file:
                if not file.try_mark(place.offset, place.size):
                    return False
                try:
                    record = segment.read(place.offset, end=place.offset + place.size)
                    if (
                        record is not None
                        and torn
                        and not is_whole(file, segment.place(place.offset), record)
                    ):
                        segment.mark_removed(place.offset, record)
                        record = None
                finally:
                    file.unmark(place.offset, place.size)
        except FileNotFoundError:
            return True  # it is dropped with the next refresh
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
        if record is not None and record.size != place.size:
            self.remove(place)  # the layout changed; the next refresh reads it
            return True
        if record is not None and not record.live:
            record = None
        if record is None or record.key != place.key or record.nbytes != place.nbytes:
            self.take_place(place)
            self.put(place, record)
        return True

    def close(self) -> None:
        """Release everything."""
        self.events = None  # all of it is still there
        with suppress(OSError):
            self.write_down(at_once=True)
        for segment in list(self.segments.values()):
            self.drop(segment)
        self.hints.close()
