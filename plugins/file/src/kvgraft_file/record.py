"""The layout of a record in a segment: a block that describes it, then the padded payload.

    offset  bytes
         0      8  magic: a live record, or a removed one
         8      2  format version
        10      6  zero
        16     16  the segment's identity
        32      8  offset in the segment
        40      8  payload bytes
        48     32  key
        80    256  the value's header
       336      8  XXH3-64 of the 336 bytes above
       344        zero, to 4096

All numbers are little-endian. A block names its own place, so a copy of it elsewhere, as in a
payload, is not taken for a record.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import xxhash

from kvgraft_storage import BLOCK_NBYTES, HEADER_NBYTES, round_up

__all__ = [
    "MAGICS",
    "MAX_SEGMENT_NBYTES",
    "SEGMENT_MAGIC",
    "Place",
    "Record",
    "SegmentHeader",
    "encode_record",
    "encode_segment",
    "gap",
    "read_record",
    "read_segment",
]

LIVE, REMOVED = b"KVGRec\x01\x93", b"KVGRec\x00\x93"
MAGICS = (LIVE, REMOVED)
"""The first bytes of a record's block."""

MAX_SEGMENT_NBYTES = 4 << 30
"""The largest segment: a bound for reading a file whose blocks may be damaged."""

MIN_SEGMENT_NBYTES = 3 * BLOCK_NBYTES
SEGMENT_MAGIC = b"KVGSeg\x01\x93"
FORMAT_VERSION = 1
KEY_NBYTES = 32
_RECORD = struct.Struct("<8sH6s16sQQ32s")
_SEGMENT = struct.Struct("<8sH6s16sQQ")
_SEAL = struct.Struct("<Q")


class Place(NamedTuple):
    """A record's place: the segment's identity and the offset of its block."""

    segment: bytes
    offset: int


class Record(NamedTuple):
    """A record's block that is intact and at its own place.

    Attributes:
        key: the value's key.
        nbytes: payload length.
        live: false for a removed record.
        header: the value's header, 256 bytes.
    """

    key: bytes
    nbytes: int
    live: bool
    header: bytes

    @property
    def size(self) -> int:
        """Bytes in the segment."""
        return BLOCK_NBYTES + round_up(self.nbytes)


class SegmentHeader(NamedTuple):
    """A segment's first block.

    Attributes:
        identity: 16 random bytes.
        number: the number in its name; segments are reclaimed in this order.
        capacity: length of the file while it is written.
    """

    identity: bytes
    number: int
    capacity: int


def gap(nbytes: int) -> Record:
    """A removed record that covers `nbytes` bytes, in whole blocks."""
    return Record(bytes(KEY_NBYTES), nbytes - BLOCK_NBYTES, False, bytes(HEADER_NBYTES))


def encode_record(place: Place, record: Record) -> bytes:
    """A record's block."""
    fields = _RECORD.pack(
        LIVE if record.live else REMOVED,
        FORMAT_VERSION,
        bytes(6),
        place.segment,
        place.offset,
        record.nbytes,
        record.key,
    )
    return _sealed(fields + record.header)


def read_record(block: bytes | memoryview, place: Place) -> Record | None:
    """The record in a block; None if it is damaged or was written for another place."""
    size = _RECORD.size + HEADER_NBYTES
    if not _is_whole(block, size):
        return None
    magic, version, _, segment, offset, nbytes, key = _RECORD.unpack_from(block)
    if magic not in MAGICS or version != FORMAT_VERSION or (segment, offset) != place:
        return None
    return Record(key, nbytes, magic == LIVE, bytes(block[_RECORD.size : size]))


def encode_segment(header: SegmentHeader) -> bytes:
    """A segment's first block."""
    return _sealed(_SEGMENT.pack(SEGMENT_MAGIC, FORMAT_VERSION, bytes(6), *header))


def read_segment(block: bytes | memoryview) -> SegmentHeader | None:
    """The header in a segment's first block; None if it is damaged or not a segment's."""
    if len(block) < BLOCK_NBYTES or not _is_whole(block, _SEGMENT.size):
        return None
    magic, version, _, *rest = _SEGMENT.unpack_from(block)
    if magic != SEGMENT_MAGIC or version != FORMAT_VERSION:
        return None
    header = SegmentHeader(*rest)
    fits = MIN_SEGMENT_NBYTES <= header.capacity <= MAX_SEGMENT_NBYTES
    return header if fits and header.capacity % BLOCK_NBYTES == 0 else None


def _sealed(fields: bytes) -> bytes:
    return (fields + _SEAL.pack(xxhash.xxh3_64_intdigest(fields))).ljust(BLOCK_NBYTES, b"\0")


def _is_whole(block: bytes | memoryview, size: int) -> bool:
    (seal,) = _SEAL.unpack_from(block, size)
    return bool(xxhash.xxh3_64_intdigest(block[:size]) == seal)
