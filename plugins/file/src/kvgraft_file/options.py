"""Options of the file backend."""

from __future__ import annotations

from pydantic import Field, model_validator
from typing_extensions import Self

from kvgraft import Nbytes
from kvgraft_file.open_files import FEWEST
from kvgraft_file.record import MAX_SEGMENT_NBYTES, MIN_SEGMENT_NBYTES
from kvgraft_storage import BLOCK_NBYTES, StorageOptions

__all__ = ["FileOptions"]

LARGEST_DEFAULT = 64 << 20
SEGMENTS = 8
"""Segments that a small capacity is divided into."""

MAX_SEGMENTS = 1024
"""Segments that a large capacity is divided into; bounded, since every refresh checks all of them.
"""


class FileOptions(StorageOptions):
    """The size of a store and of its pieces.

    Attributes:
        capacity: bytes of all segments in the directory, of all writers together.
        segment: bytes of one segment, which is reserved and evicted as a whole; an eighth of
            the capacity by default, at most 64 MiB, or as much as 1,024 of them need, at most
            4 GiB. A payload must fit into a segment.
        refresh_s: seconds after which other processes' records are seen at the latest.
        max_open_files: segments that stay open; by default an eighth of the process's limit
            (`ulimit -n`), at most 256.
    """

    capacity: Nbytes = Field(default=10 << 30, ge=8 * BLOCK_NBYTES)
    segment: Nbytes | None = Field(default=None, ge=MIN_SEGMENT_NBYTES, le=MAX_SEGMENT_NBYTES)
    refresh_s: float = Field(default=0.2, ge=0)
    max_open_files: int | None = Field(default=None, ge=FEWEST)

    @property
    def segment_nbytes(self) -> int:
        """Bytes of one segment, in whole blocks."""
        wanted = self.segment or min(
            max(LARGEST_DEFAULT, -(-self.capacity // MAX_SEGMENTS)),
            self.capacity // SEGMENTS,
            MAX_SEGMENT_NBYTES,
        )
        return max(MIN_SEGMENT_NBYTES, wanted // BLOCK_NBYTES * BLOCK_NBYTES)

    @model_validator(mode="after")
    def _two_segments(self) -> Self:
        if self.capacity < 2 * self.segment_nbytes:
            raise ValueError(
                f"capacity {self.capacity} < 2 x segment {self.segment_nbytes}; "
                "one is written while another is evicted"
            )
        return self
