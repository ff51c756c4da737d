"""Fixed strided attention: one's own block, and the last tokens of every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgraft import Span, Term


@dataclass(frozen=True, slots=True)
class Strided(Term):
    block: int
    summary: int

    def needs(self, boundary: int, token: int) -> bool:
        own = token // self.block == (boundary - 1) // self.block
        return own or token % self.block >= self.block - self.summary

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        if not boundary:
            return []
        own = (boundary * page_size - 1) // self.block * self.block
        spans = [Span(own // page_size, boundary)]
        for end in range(self.block, own + 1, self.block):
            spans.append(Span((end - self.summary) // page_size, -(-end // page_size)))
        return spans

    def width(self, boundary: int, page_size: int) -> int:
        blocks = boundary * page_size // self.block
        pages = blocks * (-(-self.summary // page_size) + 1) + -(-self.block // page_size) + 1
        return min(boundary, pages)

    def contains(self, other: Term) -> bool:
        return self == other

    def is_within(self, other: Term) -> bool:
        return False

    @property
    def ends_at_boundary(self) -> bool:
        return True

    @property
    def stored_tokens(self) -> float:
        return float("inf")
