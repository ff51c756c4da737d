"""Reading a segment from start to end to find what is damaged."""

from __future__ import annotations

from kvgraft.storage.backend import Damage, Value, VerifyReport
from kvgraft.storage.file.disk import TruncatedRead
from kvgraft.storage.file.record import Record
from kvgraft.storage.file.segment import Segment
from kvgraft.storage.file.transfer import Incoming
from kvgraft.storage.memory import aligned
from kvgraft.storage.payload import HEADER_NBYTES, damage
from kvgraft.storage.status import Status

__all__ = ["verify_segment"]


def verify_segment(segment: Segment) -> VerifyReport:
    """Every record that was not removed, checked to its last byte."""
    n_records = nbytes = 0
    damaged = []
    for offset, record in segment.walk():
        where = f"{segment.file.path}@{offset}"
        if record is None:
            damaged.append(Damage(where, "", "the block in front of a record is damaged"))
        elif record.live:
            n_records += 1
            nbytes += record.size
            reason = _damage(segment, offset, record)
            if reason is not None:
                damaged.append(Damage(where, record.key.hex(), reason))
    return VerifyReport(n_records, nbytes, tuple(damaged))


def _damage(segment: Segment, offset: int, record: Record) -> str | None:
    payload = aligned(record.nbytes)[: record.nbytes]
    value = Value(memoryview(bytearray(HEADER_NBYTES)), payload)
    incoming = Incoming(value)
    try:
        segment.file.read(incoming.pieces, offset)
    except TruncatedRead:
        return f"the segment ends inside the payload of {record.nbytes} bytes"
    if incoming.finish(record.key, segment.place(offset)) is not Status.OK:
        return None  # removed since
    return damage(record.key, value.header, value.payload)
