"""What records hand to the disk, and one takes from it, as pieces of block-aligned memory.

Memory that starts at a block is read and written as it is; other memory goes through a copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.storage.backend import Value
from kvgraft.storage.file.disk import DISK_ERRORS, DiskFile, TruncatedRead
from kvgraft.storage.file.record import Place, Record, encode_record, read_record
from kvgraft.storage.memory import BLOCK_NBYTES, aligned, copy, is_aligned, round_up
from kvgraft.storage.payload import HEADER_NBYTES, damage, read
from kvgraft.storage.status import Status

__all__ = ["Incoming", "damage_at", "is_whole", "outgoing", "read_value"]


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
        """Fill the value from what was read; the payload is for the caller to verify."""
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
    header = read(record.header)
    if isinstance(header, Status) or not record.live:
        return True
    value = read_value(file, place, record)
    return value is not None and damage(header.key, value.header, value.payload) is None


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


def damage_at(file: DiskFile, place: Place, record: Record) -> str | None:
    """What is wrong with the payload of a record; None if nothing is, or it was removed since.

    Raises:
        OSError: the disk failed, and not only here.
    """
    try:
        value = read_value(file, place, record)
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        return f"the disk does not give it: {error.strerror}"
    if value is not None:
        return damage(record.key, value.header, value.payload)
    if file.size < place.offset + record.size:
        return f"the segment ends inside the payload of {record.nbytes} bytes"
    return None
