"""A segment: a preallocated file that one process writes from its start to its end.

    created ─► active: locked by its writer, full length ─► sealed: cut to what is used, no lock
                          └── the writer died: whoever takes the lock scans it and seals it

A writer has more than one of them active while writes to full ones are on their way.

What is being written is locked as well, byte for byte, and so is the first block as long as the
writer lives: a record's block may be there before the payload behind it is, and nobody else takes
the record in until all of it is written. A writer that died may have left one like that, so
whoever scans its segment under the lock reads the payloads too, while others wait.

A write that failed, or a writer that died, may leave nothing in front of what is whole; then a
record stands there that says so, removed from the start.

Two things change what was written. Removing a record overwrites its block. Reclaiming a segment
makes the next one of its blocks, which are faster to write over than new ones: the file is renamed
first and then gets another identity, so that nobody takes old records for new ones, and a reader
who finds the name unchanged after a read knows that it read what was there before.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvgraft.storage.file.disk import DISK_ERRORS, DiskFile, TruncatedRead
from kvgraft.storage.file.record import (
    MAGICS,
    Place,
    Record,
    SegmentHeader,
    encode_record,
    encode_segment,
    gap,
    read_record,
    read_segment,
)
from kvgraft.storage.file.transfer import is_whole
from kvgraft.storage.memory import BLOCK_NBYTES, aligned

__all__ = ["SUFFIX", "Segment"]

SUFFIX = ".kvseg"
CHUNK_NBYTES = 1 << 20
"""Read at once while looking for the next record behind damage."""


class Segment:
    """One segment, open.

    Attributes:
        file: the open file.
        header: what its first block says.
        tail: end of the records known here, and of the places for those on their way.
        coming: offsets of those places.
        sealed: nobody will append.
        mine: this process appends.
        keys: of the records that were found or written here.
    """

    __slots__ = ("coming", "file", "header", "keys", "mine", "sealed", "tail")

    def __init__(self, file: DiskFile, header: SegmentHeader) -> None:
        self.file = file
        self.header = header
        self.tail = BLOCK_NBYTES
        self.coming: set[int] = set()
        self.sealed = False
        self.mine = False
        self.keys: list[bytes] = []

    @classmethod
    def create(cls, directory: Path, number: int, capacity: int, *, direct: bool) -> Segment:
        """A new segment that this process appends to; visible only when it is complete.

        Raises:
            OSError: no room, or the directory cannot be written.
        """
        flags = os.O_CREAT | os.O_EXCL
        file = DiskFile(_unfinished(directory, number), direct=direct, flags=flags)
        return cls._begin(file, directory, number, capacity)

    @classmethod
    def reuse(cls, old: Segment, number: int, capacity: int, *, direct: bool) -> Segment:
        """A new segment in place of one that nobody writes to; under its and the directory's lock.

        Raises:
            OSError: as for `create`; the old segment is gone then.
        """
        directory = old.file.path.parent
        path = _unfinished(directory, number)
        old.file.path.rename(path)
        old.file.unlock()  # whoever takes it now sees that the name is gone
        return cls._begin(DiskFile(path, direct=direct), directory, number, capacity)

    @classmethod
    def _begin(cls, file: DiskFile, directory: Path, number: int, capacity: int) -> Segment:
        header = SegmentHeader(secrets.token_bytes(16), number, capacity)
        try:
            file.lock()
            file.mark(0, BLOCK_NBYTES)
            os.ftruncate(file.fd, capacity)
            os.posix_fallocate(file.fd, 0, capacity)
            file.write_block(encode_segment(header), 0)
            final = directory / f"{number:016x}{SUFFIX}"
            file.path.rename(final)
            file.path = final
        except OSError:
            file.path.unlink(missing_ok=True)
            file.let_go()
            raise
        segment = cls(file, header)
        segment.mine = True
        return segment

    @classmethod
    def open(cls, path: Path, number: int, *, direct: bool) -> Segment | None:
        """A segment that is there; None if the file is none, or another one's copy.

        Raises:
            FileNotFoundError: it is gone.
            OSError: it cannot be read.
        """
        file = DiskFile(path, direct=direct)
        try:
            block = file.readable_block(0)
        except OSError:
            file.let_go()
            raise
        header = None if block is None else read_segment(block)
        if header is None or header.number != number:
            file.let_go()
            return None
        return cls(file, header)

    def place(self, offset: int) -> Place:
        """The place of the record at an offset."""
        return Place(self.header.identity, offset)

    def read(self, offset: int, *, end: int) -> Record | None:
        """The record at an offset; None if there is no whole one that ends by `end`."""
        block = self.file.readable_block(offset)
        record = None if block is None else read_record(block, self.place(offset))
        return record if record is not None and offset + record.size <= end else None

    def news(self) -> Iterator[tuple[int, Record]]:
        """Records behind `tail`, with their offsets; what is not all written ends them.

        A segment without a writer is read to its end, past what is damaged, and sealed.

        Raises:
            OSError: it cannot be read.
        """
        if self.mine or self.sealed:
            return
        end = self.file.size
        if end < self.header.capacity:
            yield from self._rest(end, sealed=True)
            self.sealed = True
        elif self.file.try_lock():
            try:
                if self.file.is_gone:  # reused, perhaps; what is in it is another's
                    return
                end = self.file.size  # sealed, perhaps, before it was locked
                unsealed = end == self.header.capacity
                yield from self._rest(end, sealed=not unsealed)
                self.sealed = True
                if unsealed:
                    os.ftruncate(self.file.fd, self.tail)
            finally:
                self.file.unlock()
        else:
            yield from self._written(end)

    def _rest(self, end: int, *, sealed: bool) -> Iterator[tuple[int, Record]]:
        """All there is behind `tail`; what nobody sealed may be torn, and is removed then."""
        while self.tail < end:
            record = self.read(self.tail, end=end)
            if record is None:
                found = self._next_record(self.tail + BLOCK_NBYTES, end)
                if found is None:
                    return
                if not sealed:
                    self._leave_gap(self.tail, found)
                self.tail = found
                continue
            whole = sealed or is_whole(self.file, self.place(self.tail), record)
            if whole:
                yield self.tail, record
            elif whole is False:
                self.kill(self.tail, record)
            self.tail += record.size

    def _written(self, end: int) -> Iterator[tuple[int, Record]]:
        """What another process has written behind `tail`, as far as it has ended writing."""
        while self.tail < end:
            record = self.read(self.tail, end=end)
            if record is None or self.file.is_locked(self.tail, record.size):
                return
            if not self.file.is_locked(0, BLOCK_NBYTES):
                return  # its writer has died or sealed it, and somebody has the lock for a moment
            yield self.tail, record
            self.tail += record.size

    def walk(self) -> Iterator[tuple[int, int, Record | None]]:
        """All records there are now: from where to where each is, and None where none can be read.

        A sealed segment was cut behind its last record, so what is behind it now is damage too.
        """
        end = self.file.size if self.sealed else min({self.tail} | self.coming)
        offset = BLOCK_NBYTES
        while offset < end:
            record = self.read(offset, end=end)
            if record is None:
                behind = self._next_record(offset + BLOCK_NBYTES, end) or end
            else:
                behind = offset + record.size
            yield offset, behind, record
            offset = behind

    def _next_record(self, offset: int, end: int) -> int | None:
        """The first whole record from an offset on; None if there is none."""
        memory = aligned(CHUNK_NBYTES)
        while offset < end:
            chunk = memory[: min(CHUNK_NBYTES, (end - offset) // BLOCK_NBYTES * BLOCK_NBYTES)]
            if not len(chunk):
                return None
            try:
                self.file.read([chunk], offset)
            except TruncatedRead:  # sealed meanwhile
                return None
            except OSError as error:
                if error.errno not in DISK_ERRORS:
                    raise
                self._read_what_can_be(chunk, offset)
            for start in range(0, len(chunk), BLOCK_NBYTES):
                if bytes(chunk[start : start + 8]) in MAGICS:
                    block = chunk[start : start + BLOCK_NBYTES]
                    if read_record(block, self.place(offset + start)) is not None:
                        return offset + start
            offset += len(chunk)
        return None

    def _read_what_can_be(self, chunk: memoryview, offset: int) -> None:
        for start in range(0, len(chunk), BLOCK_NBYTES):
            block = self.file.readable_block(offset + start)
            chunk[start : start + BLOCK_NBYTES] = block or bytes(BLOCK_NBYTES)

    @contextmanager
    def appending(self, records: Sequence[Record]) -> Iterator[int]:
        """The place at the tail, to be written meanwhile; given back if that fails."""
        nbytes = sum(record.size for record in records)
        offset = self.tail
        self.tail += nbytes
        self.coming.add(offset)
        try:
            with self.file.locked(offset, nbytes):
                try:
                    yield offset
                except OSError:
                    self._give_back(offset, records)
                    raise
        finally:
            self.coming.discard(offset)

    def _give_back(self, offset: int, records: Sequence[Record]) -> None:
        """Take away what a write that failed may have left, if the disk lets us.

        The place is free again, or a gap if something behind it was written.
        """
        end = offset + sum(record.size for record in records)
        is_last = self.tail == end
        if is_last:
            self.tail = offset
        with suppress(OSError):
            if not is_last:
                self._leave_gap(offset, end)
                return
            for record in records:
                self.file.write_block(bytes(BLOCK_NBYTES), offset)
                offset += record.size

    def _leave_gap(self, offset: int, end: int) -> None:
        """Say of a place that nothing is in it, for whoever reads on behind it."""
        self.file.write_block(encode_record(self.place(offset), gap(end - offset)), offset)

    @property
    def is_empty(self) -> bool:
        """Whether no record is in it, nor on its way."""
        return self.tail == BLOCK_NBYTES

    def kill(self, offset: int, record: Record) -> None:
        """Mark a record removed, for everybody."""
        dead = record._replace(live=False)
        self.file.write_block(encode_record(self.place(offset), dead), offset)

    def seal(self) -> None:
        """Append no more; give back what is not used."""
        os.ftruncate(self.file.fd, self.tail)
        self.sealed, self.mine = True, False
        self.file.unlock()

    def unlink(self) -> None:
        """Take its name away, if that is still its own; under the directory's lock."""
        if not self.file.is_gone:
            self.file.path.unlink()


def _unfinished(directory: Path, number: int) -> Path:
    """What a segment is called while it is made."""
    return directory / f".{number:016x}-{os.getpid()}.tmp"
