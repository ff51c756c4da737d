"""A segment: a preallocated file that one process writes from start to end.

    created ─► active: locked by its writer, full length ─► sealed: cut to its used length, no lock
                          └── the writer ended: the next holder of the lock scans it and seals it

A writer has several active segments while writes to full ones are in flight.

Bytes are locked while they are written, and the first block as long as the writer runs. A record's
block may be on the disk before its payload, so no other process adds the record until all of it is
written. A writer that ended may have left such a record, so the process that scans its segment
under the lock reads the payloads too, while others wait.

The records of a failed write are marked removed. Missing bytes in front of whole records become a
gap, which is a record that was written as removed.

A place in a sealed segment keeps its bounds, so that every process that knows it can overwrite its
record. If damage hides the bounds, a process that makes new places there first announces that they
may overlap old ones; see `SharedHints`.

Two operations change written data. Removing a record overwrites its block. Reclaiming a segment
reuses its blocks for the next one, because overwriting is faster than new blocks. The file is
renamed first and then gets another identity, so that no process takes old records for new ones. If
the name is unchanged after a read, the data is the old segment's.
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
"""Errors of opening another process's file."""

Opener = Callable[[Path, int], DiskFile]
"""Opens a file of the directory, with further flags of `os.open`."""

CHUNK_NBYTES = 1 << 20
"""Bytes per read while searching for the next record behind damage."""

RETRY_BACKOFF = 20
"""After a read error, wait this multiple of the failed read's duration before retrying."""


class Segment:
    """One segment, open.

    Attributes:
        file: the open file.
        header: the content of its first block.
        tail: end of the known records, and of the places for records that are being written.
        coming: offsets of places whose records are being written.
        sealed: whether no process will append.
        mine: whether this process appends.
        unreadable: whether the last read at `tail` failed.
        places: places by offset, of records that were found or written here.
        holes: ranges in which damage hides the records.
        layout: its layout in `SharedHints` when it was read; -1 before.
        n_written_over: its places that this process is overwriting.
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
        """Create a segment that this process appends to; it is visible once it is complete.

        Raises:
            OSError: no room, or the directory cannot be written.
        """
        file = opener(unfinished_path(directory, SUBJECT), os.O_CREAT | os.O_EXCL)
        return cls._begin(file, directory, number, capacity)

    @classmethod
    def reuse(cls, opener: Opener, old: Segment, number: int, capacity: int) -> Segment:
        """Turn a segment without a writer into a new one; under its lock and the directory's.

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
        """Open an existing segment; None if it is no segment, another one's copy or unreadable.

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
        if file.is_gone:  # reclaimed, and another segment now
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return None

    def place(self, offset: int) -> Place:
        """The place of the record at an offset."""
        return Place(self.header.identity, offset)

    def read(self, offset: int, *, end: int) -> Record | None:
        """The record at an offset; None if no whole record there ends by `end`.

        Raises:
            OSError: it cannot be read.
        """
        try:
            record = read_record(self.file.block(offset), self.place(offset))
        except TruncatedRead:
            return None
        return record if record is not None and offset + record.size <= end else None

    def rewind(self) -> None:
        """Let `news` read from the start again, at once; for a segment without places."""
        self.tail = BLOCK_NBYTES
        self.holes = []
        self.sealed = False
        self.unreadable = False
        self._retry_at = 0.0

    def news(self) -> Iterator[tuple[int, Record]]:
        """Records behind `tail`, with their offsets, up to the first unfinished one.

        A segment without a writer is read to its end, past damaged records, and sealed. A read
        error ends it too; the next call tries that read again.

        Raises:
            FileNotFoundError: it is gone.
            OSError: the whole disk failed, not only this place.
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
                if self.file.is_gone:  # perhaps reused; its content is another segment's
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
        """Bytes to read; data behind its capacity is not the segment's, and may be very long."""
        return min(self.file.size, self.header.capacity)

    def _rest(self, end: int) -> Iterator[tuple[int, Record]]:
        """All records behind `tail`, beyond damaged ones."""
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
        """All records behind `tail`, beyond damage, up to the end of the sealed segment."""
        known = self.tail
        for offset, record in self._rest(end):
            self.add_hole(known, offset)
            yield offset, record
            known = offset + record.size
        self.add_hole(known, end)

    def add_hole(self, start: int, end: int) -> None:
        """Note a range of whole blocks without a readable record, if it is not empty."""
        nbytes = (end - start) // BLOCK_NBYTES * BLOCK_NBYTES
        if nbytes:
            self.holes.append((start, start + nbytes))

    def _recover_unfinished(self, end: int) -> Iterator[tuple[int, Record]]:
        """Whole records behind `tail`; marks torn ones removed and turns missing ones into gaps."""
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
        """All current records with their ranges; None as the record of a damaged range.

        A sealed segment ends with its last record, so data behind that is damage too.
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
        """Offset of the next record behind a block that is no record's."""
        try:
            return self.next_record(offset + BLOCK_NBYTES, end) or end
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            return end

    def next_record(self, offset: int, end: int) -> int | None:
        """Offset of the first record at or behind an offset; None if there is none.

        Raises:
            OSError: it cannot be read.
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
        """Yield the place at the tail while it is written; if that fails, its records are removed.

        After a failure the place is not reused: a process that read a record of it may remove that
            late.
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
        """Mark a record removed, for all processes."""
        dead = record._replace(live=False)
        self.file.write_block(encode_record(self.place(offset), dead), offset)

    def make_place(self, offset: int, nbytes: int) -> None:
        """Write a gap over damage, so that all processes find the same places.

        Raises:
            OSError: the disk failed.
        """
        self.file.write_block(encode_record(self.place(offset), gap(nbytes)), offset)

    def seal(self) -> None:
        """Stop appending; give back the unused rest.

        A segment that could not be truncated is truncated at its next opening.
        """
        self.sealed, self.mine = True, False
        try:
            with suppress(OSError):
                os.ftruncate(self.file.fd, self.tail)
        finally:
            self.file.unlock()

    def unlink(self) -> None:
        """Unlink its file, if the name is still its own; under the directory's lock."""
        if not self.file.is_gone:
            self.file.path.unlink()


def segment_path(directory: Path, number: int) -> Path:
    """The path of a segment."""
    return directory / f"{number:016x}{SUFFIX}"
