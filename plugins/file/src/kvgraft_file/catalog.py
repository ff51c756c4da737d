"""This process's view of a store: its segments, and the place of each key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from kvgraft.storage import Change, EventLog
from kvgraft_file.directory import Directory
from kvgraft_file.record import Record
from kvgraft_file.segment import Segment

__all__ = ["Catalog", "Entry"]


class Entry:
    """Where a key's record is.

    Attributes:
        segment: the segment it is in.
        offset: of its block there.
        nbytes: payload length.
        used: read since it was written or last passed over by a reclaim.
    """

    __slots__ = ("nbytes", "offset", "segment", "used")

    def __init__(self, segment: Segment, offset: int, nbytes: int) -> None:
        self.segment = segment
        self.offset = offset
        self.nbytes = nbytes
        self.used = False


class Catalog:
    """Keys and segments, found by reading segments; the caller locks.

    Attributes:
        entries: by key.
        copies: further records of keys, which two processes stored or a reclaim carried over.
        segments: by number; this process's own among them.
        foreign: files named as segments that are none.
        unsynced: segments with records that `flush` has to make durable.
        events: told what keys come and go; None if nobody listens.
        retiring: numbers of segments this process is about to reclaim or to begin: not for others
            to take in, though they are listed.
    """

    def __init__(self, directory: Directory) -> None:
        self.entries: dict[bytes, Entry] = {}
        self.copies: dict[bytes, list[Entry]] = {}
        self.segments: dict[int, Segment] = {}
        self.foreign: list[Path] = []
        self.unsynced: set[Segment] = set()
        self.retiring: set[int] = set()
        self.events: EventLog | None = None
        self._directory = directory

    def refresh(self) -> None:
        """Take in other processes' records, reclaimed segments and clears.

        Raises:
            OSError: the directory or a segment cannot be read.
        """
        listed = {each.number: each.inode for each in self._directory.segments()}
        for number, segment in list(self.segments.items()):
            if listed.get(number) != segment.file.inode and segment.file.is_gone:
                self.drop(segment)
        self.foreign = []
        for number in sorted(listed.keys() - self.retiring):
            known = self.segments.get(number)
            if known is None:
                path = self._directory.segment_path(number)
                try:
                    known = Segment.open(self._directory.open, path, number)
                except FileNotFoundError:  # reclaimed since it was listed
                    continue
                if known is None:
                    self.foreign.append(path)
                    continue
                self.segments[number] = known
            try:
                for offset, record in known.news():
                    self.add(known, offset, record)
            except FileNotFoundError:  # the same, and it was closed
                self.drop(known)

    def sizes(self) -> dict[int, int]:
        """Bytes that count against the capacity, by segment: at most its declared length."""
        sizes = {}
        for number, nbytes, _ in self._directory.segments():
            known = self.segments.get(number)
            sizes[number] = nbytes if known is None else min(nbytes, known.header.capacity)
        return sizes

    def add(self, segment: Segment, offset: int, record: Record) -> None:
        """Take in a record; of several with one key the first known is read."""
        if not record.live:
            return
        entry = Entry(segment, offset, record.nbytes)
        segment.keys.append(record.key)
        if self.entries.setdefault(record.key, entry) is not entry:
            self.copies.setdefault(record.key, []).append(entry)
        else:
            self._log(Change.STORED, [record.key])

    def forget(self, key: bytes, entry: Entry) -> None:
        """Drop one record of a key; another takes its place if there is one."""
        others = self.copies.pop(key, [])
        if self.entries.get(key) is entry:
            del self.entries[key]
            if others:
                self.entries[key] = others.pop(0)
            else:
                self._log(Change.REMOVED, [key])
        else:
            others = [other for other in others if other is not entry]
        if others:
            self.copies[key] = others

    def take(self, key: bytes) -> list[Entry]:
        """Drop a key; every record it has."""
        taken = self._take(key)
        if taken:
            self._log(Change.REMOVED, [key])
        return taken

    def _take(self, key: bytes) -> list[Entry]:
        entry = self.entries.pop(key, None)
        return [] if entry is None else [entry, *self.copies.pop(key, [])]

    def _log(self, change: Change, keys: Sequence[bytes]) -> None:
        if self.events is not None:
            self.events.add(change, keys)

    def drop(self, segment: Segment) -> None:
        """Let go of a segment and all that is in it."""
        self.unsynced.discard(segment)
        gone = []
        for key in dict.fromkeys(segment.keys):
            known = self._take(key)
            left = [entry for entry in known if entry.segment is not segment]
            if left:
                self.entries[key] = left[0]
            elif known:
                gone.append(key)
            if len(left) > 1:
                self.copies[key] = left[1:]
        self._log(Change.EVICTED, gone)
        if self.segments.get(segment.header.number) is segment:
            del self.segments[segment.header.number]
            segment.file.let_go()

    def of(self, segment: Segment) -> Iterable[tuple[bytes, Entry]]:
        """A segment's entries, in the order of writing."""
        for key in segment.keys:
            entry = self.entries.get(key)
            if entry is not None and entry.segment is segment:
                yield key, entry

    def close(self) -> None:
        """Let go of everything."""
        self.events = None  # nothing of it is gone
        for segment in list(self.segments.values()):
            self.drop(segment)
