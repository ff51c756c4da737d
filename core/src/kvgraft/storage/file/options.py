"""Options of the file backend."""

from __future__ import annotations

from pydantic import ByteSize, Field, model_validator
from typing_extensions import Self

from kvgraft.storage.driver import StorageOptions
from kvgraft.storage.memory import BLOCK_NBYTES

__all__ = ["FileOptions"]

LARGEST_DEFAULT = 64 << 20
SEGMENTS = 8
"""Segments a small capacity is divided into."""


class FileOptions(StorageOptions):
    """How large a store may become, and in what pieces.

    Attributes:
        capacity: bytes of all segments in the directory, whoever wrote them.
        segment: bytes of one segment: what is reserved and what is evicted at once; an eighth of
            the capacity, at most 64 MiB, by default. A payload must fit into one.
        refresh_s: seconds for which what other processes store may stay unseen.
    """

    capacity: ByteSize = Field(default=ByteSize(10 << 30), ge=8 * BLOCK_NBYTES)
    segment: ByteSize | None = Field(default=None, ge=3 * BLOCK_NBYTES)
    refresh_s: float = Field(default=0.2, ge=0)

    @property
    def segment_nbytes(self) -> int:
        """Bytes of one segment, whole blocks."""
        wanted = self.segment or min(LARGEST_DEFAULT, self.capacity // SEGMENTS)
        return max(3, wanted // BLOCK_NBYTES) * BLOCK_NBYTES

    @model_validator(mode="after")
    def _two_segments(self) -> Self:
        if self.capacity < 2 * self.segment_nbytes:
            raise ValueError(
                f"capacity {self.capacity} < 2 x segment {self.segment_nbytes}; "
                "one is written while another is evicted"
            )
        return self
