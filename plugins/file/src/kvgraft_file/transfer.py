"""Reads and writes of records, as pieces of block-aligned memory.

Block-aligned memory is read and written directly; other memory goes through a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import xxhash

from kvgraft_file.disk import DISK_ERRORS, DiskFile, TruncatedRead
from kvgraft_file.record import (
    Place,
    Record,
    SegmentHeader,
    encode_record,
    read_record,
    read_segment,
)
from kvgraft_storage import (
    BLOCK_NBYTES,
    HEADER_NBYTES,
    Header,
    Status,
    Value,
    aligned,
    damage,
    decode_header,
    gather,
    is_aligned,
    round_up,
    scatter,
)

__all__ = [
    "Incoming",
    "Scratch",
    "damage_at",
    "has_header",
    "intact_value",
    "is_whole",
    "outgoing",
    "read_header",
]

CHUNK_NBYTES = 1 << 20
"""Bytes per read while a payload is only verified."""

SCRATCH_NBYTES = 2 << 20
"""Bytes of memory that a thread keeps: blocks of 512 records, or payloads that are copied."""


HOLES_FROM_NBYTES = 64 << 20
HOLES_SHARE = 64
"""A longer payload is not read if less than 1 / n of it is allocated on the disk.

File systems that compress store less than was written, but not so much less.
"""


Parts = Sequence[memoryview]
Cut = memoryview | list[memoryview]
"""Memory that direct I/O can use directly, or that goes through a copy."""


def _cut(parts: Parts) -> list[Cut]:
    """Split a payload's memory into runs; all but the last are whole blocks."""
    if len(parts) == 1 and len(parts[0]) and is_aligned(parts[0]):
        return [parts[0]]
    cuts: list[Cut] = []
    copied: list[memoryview] = []
    n_copied = 0
    for part in parts:
        whole = len(part) // BLOCK_NBYTES * BLOCK_NBYTES
        rest = part
        if whole and n_copied % BLOCK_NBYTES == 0 and is_aligned(part[:whole]):
            if copied:
                cuts.append(copied)
                copied, n_copied = [], 0
            cuts.append(part[:whole])
            rest = part[whole:]
        if len(rest):
            copied.append(rest)
            n_copied += len(rest)
    if copied:
        cuts.append(copied)
    return cuts


class Scratch(threading.local):
    """Aligned memory per thread, kept for its next call: mapping takes 10 µs and more."""

    memory: memoryview = memoryview(b"")

    def __call__(self, nbytes: int) -> memoryview:
        """At least so many bytes, uninitialized."""
        if len(self.memory) < nbytes:
            if nbytes > SCRATCH_NBYTES:
                return aligned(nbytes)
            self.memory = aligned(SCRATCH_NBYTES)
        return self.memory


def _room(
    payloads: Iterable[Sequence[Cut]], memory_of: Callable[[int], memoryview]
) -> Iterator[memoryview]:
    """Hands out aligned memory: a block for each record, and room for copied payloads."""
    sizes = []
    for cuts in payloads:
        copied = (sum(map(len, cut)) for cut in cuts if isinstance(cut, list))
        sizes += [BLOCK_NBYTES, *map(round_up, copied)]
    memory, start = memory_of(sum(sizes)), 0
    for size in sizes:
        yield memory[start : start + size]
        start += size


def outgoing(
    place: Place, records: Sequence[Record], payloads: Sequence[Parts]
) -> list[memoryview]:
    """Records with their payloads as consecutive bytes from a place on."""
    cuts = [_cut(parts) for parts in payloads]
    room = _room(cuts, aligned)  # its padding is zero
    pieces = []
    offset = place.offset
    for record, mine in zip(records, cuts):
        block = next(room)
        block[:] = encode_record(place._replace(offset=offset), record)
        pieces.append(block)
        for cut in mine:
            if isinstance(cut, memoryview):
                pieces.append(cut)
            else:
                piece = next(room)
                gather(piece, cut)
                pieces.append(piece)
        offset += record.size
    return pieces


class Incoming:
    """A value that is being read from a record."""

    __slots__ = ("_block", "_copied", "_value", "pieces")

    def __init__(self, value: Value, cuts: Sequence[Cut], room: Iterator[memoryview]) -> None:
        self._value = value
        self._block = next(room)
        self._copied: list[tuple[list[memoryview], memoryview]] = []
        self.pieces = [self._block]
        for cut in cuts:
            if isinstance(cut, memoryview):
                self.pieces.append(cut)
            else:
                piece = next(room)
                self._copied.append((cut, piece))
                self.pieces.append(piece)

    @classmethod
    def of(
        cls, values: Sequence[Value], memory_of: Callable[[int], memoryview] = aligned
    ) -> list[Incoming]:
        """Values to read; their additional memory is allocated once."""
        cuts = [_cut(value.parts) for value in values]
        room = _room(cuts, memory_of)
        return [cls(value, mine, room) for value, mine in zip(values, cuts)]

    def finish(self, key: bytes, place: Place) -> Status:
        """Fill the value from the bytes read; the caller verifies the payload."""
        record = read_record(self._block, place)
        if record is None:
            return Status.CORRUPT
        if not record.live or record.key != key:
            return Status.MISS
        if record.nbytes != self._value.nbytes:
            larger = record.nbytes > self._value.nbytes
            return Status.TOO_LARGE if larger else Status.CORRUPT
        self._value.header[:] = record.header
        for parts, piece in self._copied:
            scatter(parts, piece)
        return Status.OK


def is_whole(file: DiskFile, place: Place, record: Record) -> bool:
    """Whether a record is complete, according to its value's header.

    A header of an unknown format says nothing; then the record counts as complete.

    Raises:
        OSError: the disk does not give it.
    """
    header = decode_header(record.header)
    if isinstance(header, Status) or not record.live:
        return True
    return header.key == record.key and _payload_fault(file, place, record, header) is None


def read_value(file: DiskFile, place: Place, record: Record) -> Value | None:
    """A record's value; None if the file ends before it, or it was removed meanwhile."""
    payload = aligned(record.nbytes)[: record.nbytes]
    value = Value(memoryview(bytearray(HEADER_NBYTES)), payload)
    (incoming,) = Incoming.of([value])
    try:
        file.read(incoming.pieces, place.offset)
    except TruncatedRead:
        return None
    return value if incoming.finish(record.key, place) is Status.OK else None


def intact_value(file: DiskFile, place: Place, key: bytes, nbytes: int) -> Value | None:
    """A record's value; None if it is damaged or cannot be read."""
    try:
        value = read_value(file, place, Record(key, nbytes, True, bytes(HEADER_NBYTES)))
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return None
    if value is None or damage(key, value.header, value.payload) is not None:
        return None
    return value


def damage_at(file: DiskFile, place: Place, record: Record) -> str | None:
    """The fault of a record's payload; None without one, or if it was removed meanwhile.

    Raises:
        OSError: the disk failed, and not only here.
    """
    try:
        header = decode_header(record.header)
        if isinstance(header, Status):
            return f"header is {header.value}"
        if header.key != record.key:
            return f"is stored under another key than its header's {header.key.hex()[:16]}"
        fault = _payload_fault(file, place, record, header)
        if fault is not None and _was_removed(file, place, record):
            return None
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return f"the disk does not give it: {error.strerror}"
    return fault


def _payload_fault(file: DiskFile, place: Place, record: Record, header: Header) -> str | None:
    """The fault of a payload; reads in pieces, because a record can claim any length."""
    if header.nbytes != record.nbytes:
        return f"payload has {record.nbytes} bytes, its header says {header.nbytes}"
    if record.nbytes > HOLES_FROM_NBYTES and record.nbytes > HOLES_SHARE * file.allocated:
        return f"only {file.allocated} bytes are there of the payload of {record.nbytes} bytes"
    digest = xxhash.xxh3_128()
    memory = aligned(min(CHUNK_NBYTES, round_up(record.nbytes)))
    for start in range(0, record.nbytes, CHUNK_NBYTES):
        rest = record.nbytes - start
        try:
            file.read([memory[: round_up(rest)]], place.offset + BLOCK_NBYTES + start)
        except TruncatedRead:
            return f"the segment ends inside the payload of {record.nbytes} bytes"
        digest.update(memory[:rest])
    if digest.digest() != header.checksum:
        return f"payload of {record.nbytes} bytes does not match its checksum"
    return None


def _was_removed(file: DiskFile, place: Place, record: Record) -> bool:
    try:
        return read_record(file.block(place.offset), place) != record
    except TruncatedRead:
        return False


def read_header(file: DiskFile) -> SegmentHeader | None:
    """The header in a file's first block; None if it is no segment's."""
    try:
        return read_segment(file.block(0))
    except TruncatedRead:
        return None


def has_header(file: DiskFile, header: SegmentHeader) -> bool:
    """Whether a file still begins with this header; if it cannot be read, the name decides."""
    try:
        return read_header(file) == header
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return True
