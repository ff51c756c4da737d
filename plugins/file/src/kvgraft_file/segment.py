"""A segment: a preallocated file that one process writes from its start to its end.

    created ─► active: locked by its writer, full length ─► sealed: cut to its used length, no lock
                          └── the writer ended: the next holder of the lock scans it and seals it

A writer has more than one of them active while writes to full ones are on their way.

Bytes are locked while they are written, and so is the first block as long as the writer runs: a
record's block may be there before the payload behind it is, and no other process takes the record
in until all of it is written. A writer that ended may have left such a record, so the process that
scans its segment under the lock reads the payloads too, while others wait.

The records of a failed write are marked removed. A writer that ended may have left nothing in front
of whole records; then a gap stands there, a record that was written as removed.

A place in a sealed segment keeps its beginning and its end, so that another process which knows it
can write a record over the one there. If damage hides where places were, then a process that writes
there says before that its new places may be others' old ones in part; see `SharedHints`.

Two operations change written data. Removing a record overwrites its block. Reclaiming a segment
makes the next one of its blocks, which are faster to write over than new ones: the file is renamed
first and then gets another identity, so that no process takes old records for new ones. A reader
that finds the name unchanged after a read has read the old data.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraft_file.disk import (
    DISK_ERRORS,
    SUBJECT,
    DiskFile,
    TruncatedRead,
)
from kvgraft_file.record import (
    MAGICS,
    Place,
    Record,
    SegmentHeader,
    encode_record,
    encode_segment,
    gap,
    read_record,
)
from kvgraft_file.transfer import has_header, is_whole, read_header
from kvgraft_storage import BLOCK_NBYTES, aligned
from kvgraft_storage.files import unfinished_path

if TYPE_CHECKING:
    from kvgraft_file.catalog import Entry

__all__ = ["SUFFIX", "Opener", "Segment", "segment_path"]

SUFFIX = ".kvseg"
NOT_OURS = frozenset({errno.EACCES, errno.EPERM})
"""Errors of opening a file of somebody else."""

Opener = Callable[[Path, int], DiskFile]
"""Opens a file of the directory, with further flags of `os.open`."""

CHUNK_NBYTES = 1 << 20
"""Read at once while looking for the next record behind damage."""

RETRY_BACKOFF = 20
"""After a read error, wait this multiple of the failed read's duration before retrying."""


class Segment:
    """One segment, open.

    Attributes:
        file: the open file.
        header: the content of its first block.
        tail: end of the records known here, and of the places for those on their way.
        coming: offsets of those places.
        sealed: no process will append.
        mine: this process appends.
        unreadable: the last read at `tail` failed.
        places: by offset, of the records that were found or written here.
        holes: from where to where damage hides the records that were there.
        layout: that of `SharedHints` when it was read; -1 before.
        n_written_over: places of it that this process writes over just now.
    """

    __slots__ = (
        "_retry_at",
        "coming",
        "file",
        "header",
        "holes",
        "layout",
        "mine",
        "n_written_over",
        "places",
        "sealed",
        "tail",
        "unreadable",
    )

    def __init__(self, file: DiskFile, header: SegmentHeader) -> None:
        self.file = file
        self.header = header
        file.is_same = partial(has_header, file, header)
        self.tail = BLOCK_NBYTES
        self.coming: set[int] = set()
        self.sealed = False
        self.mine = False
        self.unreadable = False
        self._retry_at = 0.0
        self.places: dict[int, Entry] = {}
        self.holes: list[tuple[int, int]] = []
        self.layout = -1
        self.n_written_over = 0

    @classmethod
    def create(cls, opener: Opener, directory: Path, number: int, capacity: int) -> Segment:
        """A new segment that this process appends to; visible only when it is complete.

        Raises:
            OSError: no room, or the directory cannot be written.
        """
        file = opener(unfinished_path(directory, SUBJECT), os.O_CREAT | os.O_EXCL)
        return cls._begin(file, directory, number, capacity)

    @classmethod
    def reuse(cls, opener: Opener, old: Segment, number: int, capacity: int) -> Segment:
        """A new segment in place of one that nobody writes to; under its and the directory's lock.

        Raises:
            OSError: as for `create`; the old segment is gone then.
        """
        directory = old.file.path.parent
        path = unfinished_path(directory, SUBJECT)
        old.file.path.rename(path)
        written_over = old.file.is_locked(0, 0)
        old.file.unlock()  # its next holder sees that the name is gone
        if written_over:  # by a process that had not seen that: those blocks cannot be used
            path.unlink()
            return cls.create(opener, directory, number, capacity)
        return cls._begin(opener(path, 0), directory, number, capacity)

    @classmethod
    def _begin(cls, file: DiskFile, directory: Path, number: int, capacity: int) -> Segment:
        header = SegmentHeader(secrets.token_bytes(16), number, capacity)
        try:
            file.lock()
            file.mark(0, BLOCK_NBYTES)
            os.ftruncate(file.fd, capacity)
            os.posix_fallocate(file.fd, 0, capacity)
            file.write_block(encode_segment(header), 0)
            final = segment_path(directory, number)
            file.path.rename(final)
            file.path = final
        except BaseException:
            file.path.unlink(missing_ok=True)
            file.let_go()
            raise
        segment = cls(file, header)
        segment.mine = True
        return segment

    @classmethod
    def open(cls, opener: Opener, path: Path, number: int) -> Segment | None:
        """A segment that is there; None if the file is none, another one's copy or unreadable.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be read.
        """
        try:
            file = opener(path, 0)
        except OSError as error:
            if error.errno not in DISK_ERRORS | NOT_OURS:
                raise
            return None
        header = None
        try:
            with file:
                header = read_header(file)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                file.let_go()
                raise
        if header is not None and header.number == number:
            return cls(file, header)
        file.let_go()
        if file.is_gone:  # reclaimed since, and another's now
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return None

    def place(self, offset: int) -> Place:
        """The place of the record at an offset."""
        return Place(self.header.identity, offset)

    def read(self, offset: int, *, end: int) -> Record | None:
        """The record at an offset; None if there is no whole one that ends by `end`.

        Raises:
            OSError: the disk does not give it.
        """
        try:
            record = read_record(self.file.block(offset), self.place(offset))
        except TruncatedRead:
            return None
        return record if record is not None and offset + record.size <= end else None

    def rewind(self) -> None:
        """Let `news` begin from the start again, at once; for a segment without places."""
        self.tail = BLOCK_NBYTES
        self.holes = []
        self.sealed = False
        self.unreadable = False
        self._retry_at = 0.0

    def news(self) -> Iterator[tuple[int, Record]]:
        """Records behind `tail`, with their offsets, up to the first one not wholly written.

        A segment without a writer is read to its end, past damaged records, and sealed. A read
        error ends it too, changes nothing, and the read is tried again the next time.

        Raises:
            FileNotFoundError: it is gone.
            OSError: the disk failed, and not only here.
        """
        if self.mine or self.sealed or time.monotonic() < self._retry_at:
            return
        begun = time.monotonic()
        try:
            with self.file:
                yield from self._news()
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            now = time.monotonic()
            self._retry_at = now + RETRY_BACKOFF * (now - begun)
            self.unreadable = True
        else:
            self.unreadable = False

    def _news(self) -> Iterator[tuple[int, Record]]:
        end = self._end()
        if end < self.header.capacity:
            yield from self._sealed(end)
            self.sealed = True
        elif self.file.try_lock():
            try:
                if self.file.is_gone:  # reused, perhaps; its content is another's
                    return
                end = self._end()
                if end < self.header.capacity:  # sealed before it was locked
                    yield from self._sealed(end)
                else:
                    yield from self._recover_unfinished(end)
                    os.ftruncate(self.file.fd, self.tail)
                self.sealed = True
            finally:
                self.file.unlock()
        else:
            yield from self._written(end)

    def _end(self) -> int:
        """Bytes to look at; data behind its capacity is not a segment's, and may be endless."""
        return min(self.file.size, self.header.capacity)

    def _rest(self, end: int) -> Iterator[tuple[int, Record]]:
        """All records behind `tail`, past damaged ones."""
        while self.tail < end:
            record = self.read(self.tail, end=end)
            if record is None:
                found = self.next_record(self.tail + BLOCK_NBYTES, end)
                if found is None:
                    return
                self.tail = found
            else:
                yield self.tail, record
                self.tail += record.size

    def _sealed(self, end: int) -> Iterator[tuple[int, Record]]:
        """All records behind `tail`, past damage, up to the end: where a sealed segment was cut."""
        known = self.tail
        for offset, record in self._rest(end):
            self.add_hole(known, offset)
            yield offset, record
            known = offset + record.size
        self.add_hole(known, end)

    def add_hole(self, start: int, end: int) -> None:
        """Note whole blocks without a record that can be read, if there are any."""
        nbytes = (end - start) // BLOCK_NBYTES * BLOCK_NBYTES
        if nbytes:
            self.holes.append((start, start + nbytes))

    def _recover_unfinished(self, end: int) -> Iterator[tuple[int, Record]]:
        """Whole records behind `tail`; torn ones are removed, missing ones become gaps."""
        known = self.tail
        for offset, record in self._rest(end):
            if offset > known:
                self.tail = known  # if this fails
                self.make_place(known, offset - known)
                self.tail = offset
            known = offset + record.size
            if is_whole(self.file, self.place(offset), record):
                yield offset, record
            else:
                self.mark_removed(offset, record)

    def _written(self, end: int) -> Iterator[tuple[int, Record]]:
        """Records behind `tail` that another process has finished writing."""
        while self.tail < end:
            record = self.read(self.tail, end=end)
            if record is None or self.file.is_locked(self.tail, record.size):
                return
            if not self.file.is_locked(0, BLOCK_NBYTES):
                return  # its writer ended or sealed it, and another process has the lock
            yield self.tail, record
            self.tail += record.size

    def walk(self) -> Iterator[tuple[int, int, Record | None]]:
        """All records there are now: from where to where each is, and None where none can be read.

        A sealed segment was cut behind its last record, so data behind that is damage too.
        """
        end = self._end()
        if not self.sealed or end == self.header.capacity:
            end = min({self.tail} | self.coming)
        offset = BLOCK_NBYTES
        while offset < end:
            record = self._readable(offset, end)
            behind = self._behind(offset, end) if record is None else offset + record.size
            yield offset, behind, record
            offset = behind

    def _readable(self, offset: int, end: int) -> Record | None:
        try:
            return self.read(offset, end=end)
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            return None

    def _behind(self, offset: int, end: int) -> int:
        """Where the next record begins that can be found behind a block that is none."""
        try:
            return self.next_record(offset + BLOCK_NBYTES, end) or end
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            return end

    def next_record(self, offset: int, end: int) -> int | None:
        """Where the first record's block is from an offset on; None if there is none.

        Raises:
            OSError: the disk does not give it.
        """
        memory = aligned(CHUNK_NBYTES)
        while (data := self.file.data_from(offset)) is not None and data < end:
            offset = data
            chunk = memory[: min(CHUNK_NBYTES, (end - offset) // BLOCK_NBYTES * BLOCK_NBYTES)]
            if not len(chunk):
                return None
            try:
                self.file.read([chunk], offset)
            except TruncatedRead:  # sealed meanwhile
                return None
            for start in range(0, len(chunk), BLOCK_NBYTES):
                if bytes(chunk[start : start + 8]) in MAGICS:
                    block = chunk[start : start + BLOCK_NBYTES]
                    if read_record(block, self.place(offset + start)) is not None:
                        return offset + start
            offset += len(chunk)
        return None

    @contextmanager
    def appending(self, records: Sequence[Record]) -> Iterator[int]:
        """The place at the tail, to be written meanwhile; if that fails all of it is removed.

        The place is not used again: a process that took in a record of it may remove it late.
        """
        nbytes = sum(record.size for record in records)
        offset = self.tail
        with self.file.locked(offset, nbytes):
            self.coming.add(offset)
            self.tail += nbytes
            try:
                yield offset
            except BaseException:
                self._kill_all(offset, records)
                raise
            finally:
                self.coming.discard(offset)

    def _kill_all(self, offset: int, records: Sequence[Record]) -> None:
        for record in records:
            with suppress(OSError):
                self.mark_removed(offset, record)
            offset += record.size

    def mark_removed(self, offset: int, record: Record) -> None:
        """Mark a record removed, for everybody."""
        dead = record._replace(live=False)
        self.file.write_block(encode_record(self.place(offset), dead), offset)

    def make_place(self, offset: int, nbytes: int) -> None:
        """Write a gap over damage, so that all who read the segment find the same places.

        Raises:
            OSError: the disk failed.
        """
        self.file.write_block(encode_record(self.place(offset), gap(nbytes)), offset)

    def seal(self) -> None:
        """Append no more; give back the unused rest.

        A segment that could not be cut is cut at its next opening, like an ended writer's.
        """
        self.sealed, self.mine = True, False
        try:
            with suppress(OSError):
                os.ftruncate(self.file.fd, self.tail)
        finally:
            self.file.unlock()

    def unlink(self) -> None:
        """Take its name away, if that is still its own; under the directory's lock."""
        if not self.file.is_gone:
            self.file.path.unlink()


def segment_path(directory: Path, number: int) -> Path:
    """The path of a segment."""
    return directory / f"{number:016x}{SUFFIX}"
