"""Values cut into pieces, and pieces put together into runs of one round trip each.

A run is short because copies are what a transfer costs, and short ones stay in the processor's
caches: 8 MiB at once took 1.3 to 2 times the processor time of 512 KiB at a time. Only reads are
cut. A value that is replaced between two pieces is replaced by its equal; the checksum of the
whole says so if it was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvgraft.storage import HEADER_NBYTES, Status, Value, copy

__all__ = ["RUN_KEYS", "RUN_NBYTES", "Piece", "pieces", "runs", "take", "whole"]

RUN_NBYTES = 512 << 10
"""Most payload in one piece, and in one run unless a single value has more."""

RUN_KEYS = 256
"""Most pieces in one run."""


class Piece(NamedTuple):
    """Part of a stored value: header and payload in a row.

    Attributes:
        number: of the key in its call.
        start, stop: first byte, and the one behind the last.
        last: whether the value ends here.
    """

    number: int
    start: int
    stop: int
    last: bool

    @property
    def asked(self) -> tuple[int, int]:
        """The first and the last byte to ask for: one more on each side where there may be one.

        A value that is too long is noticed without fetching it, and one that was cut between two
        pieces is told from one that was removed: of that nothing comes.
        """
        return max(0, self.start - 1), self.stop if self.last else self.stop - 1


def whole(sizes: Sequence[int]) -> Iterator[Piece]:
    """Each value in one piece."""
    for number, size in enumerate(sizes):
        yield Piece(number, 0, HEADER_NBYTES + size, True)


def pieces(sizes: Sequence[int]) -> Iterator[Piece]:
    """Values of payloads of these lengths, the longer ones cut; the header is in the first."""
    for number, size in enumerate(sizes):
        end = HEADER_NBYTES + size
        start = 0
        while start < end:
            stop = min(end, max(start, HEADER_NBYTES) + RUN_NBYTES)
            yield Piece(number, start, stop, stop == end)
            start = stop


def runs(parts: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Neighbours, as many as go together."""
    run: list[Piece] = []
    nbytes = 0
    for part in parts:
        size = part.stop - max(part.start, HEADER_NBYTES)
        if run and (nbytes + size > RUN_NBYTES or len(run) == RUN_KEYS):
            yield run
            run, nbytes = [], 0
        run.append(part)
        nbytes += size
    if run:
        yield run


def take(piece: Piece, found: bytes, value: Value) -> Status | None:
    """Put what a server gave for a piece where it belongs; None while there is more to come.

    Nothing at all is a miss: there is none, or it was removed between two pieces.
    """
    if not found:
        return Status.MISS
    first, _ = piece.asked
    if len(found) != piece.stop - first:
        return Status.TOO_LARGE if len(found) > piece.stop - first else Status.CORRUPT
    view, start = memoryview(found)[piece.start - first :], piece.start - HEADER_NBYTES
    if piece.start == 0:
        value.header[:] = view[:HEADER_NBYTES]
        view, start = view[HEADER_NBYTES:], 0
    copy(value.payload[start : start + len(view)], view)
    return Status.OK if piece.last else None
