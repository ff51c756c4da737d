"""Reads and writes of records, as pieces of block-aligned memory.

Memory that starts at a block is read and written as it is; other memory goes through a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvgraft.storage import (
    BLOCK_NBYTES,
    HEADER_NBYTES,
    Header,
    Status,
    Value,
    aligned,
    copy,
    damage,
    decode_header,
    is_aligned,
    round_up,
)
from kvgraft_file.disk import DISK_ERRORS, DiskFile, TruncatedRead
from kvgraft_file.record import (
    Place,
    Record,
    SegmentHeader,
    encode_record,
    read_record,
    read_segment,
)

__all__ = [
    "Incoming",
    "damage_at",
    "has_header",
    "intact_value",
    "is_whole",
    "outgoing",
    "read_header",
]

CHUNK_NBYTES = 1 << 20
"""Read at once while checking a payload that nobody asked for."""


HOLES_FROM_NBYTES = 64 << 20
HOLES_SHARE = 64
"""A longer payload is not read where less than one part in so many of it is on the disk.

File systems that compress store less than was written, but not so much less.
"""


def _split(payload: memoryview) -> tuple[memoryview, int]:
    """The part direct I/O can use as it is, and how many bytes remain."""
    whole = len(payload) // BLOCK_NBYTES * BLOCK_NBYTES
    main = payload[:whole]
    if whole and not is_aligned(main):
        main = payload[:0]
    return main, len(payload) - len(main)


def outgoing(
    place: Place, records: Sequence[Record], payloads: Sequence[memoryview]
) -> list[memoryview]:
    """Records with their payloads, as they stand one behind the other from a place on."""
    cuts = [_split(payload) for payload in payloads]
    memory = aligned(sum(BLOCK_NBYTES + round_up(rest) for _, rest in cuts))
    pieces = []

    def take(nbytes: int) -> memoryview:
        nonlocal memory
        piece, memory = memory[:nbytes], memory[nbytes:]
        pieces.append(piece)
        return piece

    offset = place.offset
    for record, payload, (main, rest) in zip(records, payloads, cuts):
        take(BLOCK_NBYTES)[:] = encode_record(place._replace(offset=offset), record)
        if len(main):
            pieces.append(main)
        if rest:
            copy(take(round_up(rest))[:rest], payload[len(main) :])
        offset += record.size
    return pieces


class Incoming:
    """A value on its way from a record."""

    __slots__ = ("_block", "_bounce", "_main", "_value", "pieces")

    def __init__(self, value: Value) -> None:
        self._value = value
        self._block = aligned(BLOCK_NBYTES)
        self._main, rest = _split(value.payload)
        self._bounce = aligned(round_up(rest)) if rest else None
        self.pieces = [self._block]
        if len(self._main):
            self.pieces.append(self._main)
        if self._bounce is not None:
            self.pieces.append(self._bounce)

    def finish(self, key: bytes, place: Place) -> Status:
        """Fill the value from the bytes read; the payload is for the caller to verify."""
        record = read_record(self._block, place)
        if record is None:
            return Status.CORRUPT
        if not record.live or record.key != key:
            return Status.MISS
        if record.nbytes != len(self._value.payload):
            larger = record.nbytes > len(self._value.payload)
            return Status.TOO_LARGE if larger else Status.CORRUPT
        self._value.header[:] = record.header
        if self._bounce is not None:
            start = len(self._main)
            rest = len(self._value.payload) - start
            copy(self._value.payload[start:], self._bounce[:rest])
        return Status.OK


def is_whole(file: DiskFile, place: Place, record: Record) -> bool:
    """Whether all of a record was written, as far as its value's header says.

    A header of another format, or none of ours, says nothing; then it counts as whole.

    Raises:
        OSError: the disk does not give it.
    """
    header = decode_header(record.header)
    if isinstance(header, Status) or not record.live:
        return True
    return header.key == record.key and _payload_fault(file, place, record, header) is None


def read_value(file: DiskFile, place: Place, record: Record) -> Value | None:
    """A record's value; None where the file ends before it does, or it was removed since."""
    payload = aligned(record.nbytes)[: record.nbytes]
    value = Value(memoryview(bytearray(HEADER_NBYTES)), payload)
    incoming = Incoming(value)
    try:
        file.read(incoming.pieces, place.offset)
    except TruncatedRead:
        return None
    return value if incoming.finish(record.key, place) is Status.OK else None


def intact_value(file: DiskFile, place: Place, key: bytes, nbytes: int) -> Value | None:
    """A record's value; None where it is damaged, or the disk does not give it."""
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
    """The fault of a record's payload; None if it has none, or was removed since.

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
    """The fault of a payload, read in pieces, because a record can claim any length."""
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
    """Whether a file begins as it did; if the disk does not give that, its name has to do."""
    try:
        return read_header(file) == header
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return True
