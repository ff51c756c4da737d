"""Reaches of patterns the core does not know: terms as a third party writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgraft import Span, Term

__all__ = ["BlockSparse", "Strided"]


@dataclass(frozen=True, slots=True)
class Strided(Term):
    """Fixed strided attention: one's own block, and the last `summary` tokens of every block."""

    block: int
    summary: int

    def needs(self, boundary: int, token: int) -> bool:
        own = token // self.block == (boundary - 1) // self.block
        return own or token % self.block >= self.block - self.summary

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        at = boundary * page_size
        own = max(at - 1, 0) // self.block * self.block
        spans = [Span(own // page_size, boundary)] if boundary else []
        for end in range(self.block, own + 1, self.block):
            spans.append(Span((end - self.summary) // page_size, -(-end // page_size)))
        return spans

    def width(self, boundary: int, page_size: int) -> int:
        blocks = boundary * page_size // self.block
        pages = blocks * (-(-self.summary // page_size) + 1) + -(-self.block // page_size) + 1
        return min(boundary, pages)

    @property
    def ends_at_boundary(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class BlockSparse(Term):
    """Block-sparse attention: the first block, and the last `recent` blocks, one's own included.

    Blocks are counted from the start of the sequence.
    """

    block: int
    recent: int

    def _first_recent(self, token: int) -> int:
        return max(0, token // self.block - self.recent + 1) * self.block

    def needs(self, boundary: int, token: int) -> bool:
        return token < self.block or token >= self._first_recent(boundary)

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        recent = self._first_recent(boundary * page_size) // page_size
        first = min(boundary, -(-self.block // page_size))
        return (Span(0, first), Span(min(recent, boundary), boundary))

    def width(self, boundary: int, page_size: int) -> int:
        pages = -(-self.block // page_size) + -(-self.block * self.recent // page_size) + 1
        return min(boundary, pages)

    @property
    def ends_at_boundary(self) -> bool:
        return self.recent > 1
