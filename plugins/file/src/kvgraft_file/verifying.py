"""Reads a segment from start to end to find damage."""

from __future__ import annotations

from kvgraft_file.segment import Segment
from kvgraft_file.shared_hints import SharedHints
from kvgraft_file.transfer import damage_at
from kvgraft_storage import Damage, VerifyReport

__all__ = ["verify_segment"]


def verify_segment(segment: Segment, hints: SharedHints) -> VerifyReport:
    """Verify every live record to its last byte.

    Raises:
        FileNotFoundError: it is gone.
        OSError: the whole disk failed, not only some places.
    """
    with segment.file:
        return _verify(segment, hints)


def _verify(segment: Segment, hints: SharedHints) -> VerifyReport:
    n_records = nbytes = 0
    damaged = []
    for offset, behind, record in segment.walk():
        where = f"{segment.file.path}@{offset}"
        if record is None:
            damaged.append(Damage(where, "", f"{behind - offset:,} bytes are no record any more"))
        elif record.live:
            n_records += 1
            nbytes += record.size
            slot = hints.slot(segment.header.number, offset)
            stamp = hints.stamp(slot)
            reason = damage_at(segment.file, segment.place(offset), record)
            if reason is not None and not stamp & 1 and stamp == hints.stamp(slot):
                damaged.append(Damage(where, record.key.hex(), reason))
    if segment.unreadable:
        where = f"{segment.file.path}@{segment.tail}"
        damaged.append(Damage(where, "", "the disk cannot read from here on"))
    return VerifyReport(n_records, nbytes, tuple(damaged))
