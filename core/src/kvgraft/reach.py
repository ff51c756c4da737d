"""Reach: which tokens before a boundary a component needs in order to resume there.

A reach is data, a union of a few terms. From it the core derives which boundaries match, what a
pin covers, what a load-back fetches, what an eviction takes along and a default budget; so no
tree operation calls into a component per node.

    Everything()          [0, b)                      full attention
    Trailing(n)           [b - n, b)                  sliding window
    Leading(n)            [0, n)                      attention sinks, beside one of the others
    Chunk(n)              [floor((b-1)/n)*n, b)       chunked-local attention
    StateAt()             the state exactly at b      SSM and other recurrent states
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvgraft.errors import ConfigError
from kvgraft.types import Span

__all__ = [
    "Chunk",
    "Everything",
    "Leading",
    "PageReach",
    "Reach",
    "StateAt",
    "Term",
    "Trailing",
]


@dataclass(frozen=True, slots=True)
class Everything:
    """All tokens before the boundary."""

    def __str__(self) -> str:
        return "[0, b)"


@dataclass(frozen=True, slots=True)
class Trailing:
    """The last `tokens` tokens before the boundary."""

    tokens: int

    def __str__(self) -> str:
        return f"[b-{self.tokens}, b)"


@dataclass(frozen=True, slots=True)
class Leading:
    """The first `tokens` tokens of the sequence."""

    tokens: int

    def __str__(self) -> str:
        return f"[0, {self.tokens})"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part of the boundary's own chunk, of `tokens` tokens, that lies before it."""

    tokens: int

    def __str__(self) -> str:
        return f"[floor((b-1)/{self.tokens})*{self.tokens}, b)"


@dataclass(frozen=True, slots=True)
class StateAt:
    """The state exactly at the boundary."""

    def __str__(self) -> str:
        return "state at b"


Term = Everything | Trailing | Leading | Chunk | StateAt


def _contains(outer: Term, inner: Term) -> bool:
    """Whether, at every boundary, `outer` needs all that `inner` needs."""
    if isinstance(outer, Everything):
        return True
    if isinstance(inner, StateAt):
        return not isinstance(outer, Leading)
    if isinstance(outer, Trailing):
        return isinstance(inner, (Trailing, Chunk)) and inner.tokens <= outer.tokens
    if isinstance(outer, Leading):
        return isinstance(inner, Leading) and inner.tokens <= outer.tokens
    if isinstance(outer, Chunk):
        if isinstance(inner, Chunk):
            return outer.tokens % inner.tokens == 0
        return isinstance(inner, Trailing) and inner.tokens <= 1
    return False


@dataclass(frozen=True, slots=True)
class Reach:
    """A union of terms.

    Args:
        terms: at least one; `StateAt` only alone (a state component holds nothing else).

    Raises:
        ConfigError: no term, a size below one token, `StateAt` beside other terms, or nothing but
            `Leading`: the token before a boundary must count, or data behind the first tokens
            would be accepted that nobody ever computed.
    """

    terms: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        object.__setattr__(self, "terms", terms)
        if not terms:
            raise ConfigError("reach: no term given; use Everything(), Trailing(n), ...")
        for term in terms:
            tokens = getattr(term, "tokens", 1)
            if tokens < 1:
                raise ConfigError(f"reach: {type(term).__name__}({tokens}) needs at least 1 token")
        if self.is_state and len(terms) > 1:
            raise ConfigError("reach: StateAt() stands alone; make the rest a second component")
        if all(isinstance(term, Leading) for term in terms):
            raise ConfigError(
                f"reach: {self} does not end at the boundary; add a term that does: Trailing(n)"
            )

    @property
    def is_state(self) -> bool:
        """Whether this is the reach of a state component."""
        return any(isinstance(term, StateAt) for term in self.terms)

    @property
    def is_everything(self) -> bool:
        """Whether every token before the boundary is needed."""
        return any(isinstance(term, Everything) for term in self.terms)

    @property
    def width_tokens(self) -> float:
        """Most tokens needed at any boundary; infinite for `Everything`."""
        if self.is_everything:
            return math.inf
        return sum(getattr(term, "tokens", 0) for term in self.terms)

    def contains(self, other: Reach) -> bool:
        """Whether whatever `other` needs at a boundary, this reach needs too.

        This is the order of rule E3: data of a contained reach is of no use on a node where the
        data of the containing one is gone.
        """
        return all(any(_contains(mine, term) for mine in self.terms) for term in other.terms)

    def __str__(self) -> str:
        return " + ".join(str(term) for term in self.terms)


def _page_start(term: Term, page_size: int) -> Callable[[int], Span]:
    """The pages a term touches at a boundary given in pages."""
    if isinstance(term, Everything):
        return lambda boundary: Span(0, boundary)
    if isinstance(term, Trailing):
        pages = -(-term.tokens // page_size)
        return lambda boundary: Span(max(0, boundary - pages), boundary)
    if isinstance(term, Leading):
        pages = -(-term.tokens // page_size)
        return lambda boundary: Span(0, min(pages, boundary))
    if isinstance(term, Chunk):
        tokens = term.tokens
        return lambda boundary: Span(
            (boundary * page_size - 1) // tokens * tokens // page_size if boundary else 0, boundary
        )
    return lambda boundary: Span(boundary, boundary)


class PageReach:
    """A reach rounded outwards to whole pages.

    Attributes:
        is_state, is_everything: see `Reach`.
        window_pages: for a single `Trailing` term its pages, else None (a fast path).
        widest_pages: most pages touched at any boundary; 0 for `Everything` and states.
    """

    __slots__ = ("_starts", "is_everything", "is_state", "widest_pages", "window_pages")

    def __init__(self, reach: Reach, page_size: int) -> None:
        self.is_state = reach.is_state
        self.is_everything = reach.is_everything
        self.window_pages: int | None = None
        if len(reach.terms) == 1 and isinstance(reach.terms[0], Trailing):
            self.window_pages = -(-reach.terms[0].tokens // page_size)
        self.widest_pages = sum(
            -(-term.tokens // page_size) + (isinstance(term, Chunk) and term.tokens % page_size > 0)
            for term in reach.terms
            if not isinstance(term, (Everything, StateAt))
        )
        terms: tuple[Term, ...] = (Everything(),) if self.is_everything else reach.terms
        self._starts = tuple(_page_start(term, page_size) for term in terms)

    def spans(self, boundary: int) -> tuple[Span, ...]:
        """Disjoint page ranges needed at `boundary` (in pages), in order; empty for a state."""
        if self.is_state or boundary == 0:
            return ()
        if self.window_pages is not None:
            start = boundary - self.window_pages
            return (Span(start if start > 0 else 0, boundary),)
        merged: list[Span] = []
        for span in sorted(start(boundary) for start in self._starts):
            if merged and span.start <= merged[-1].end:
                merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
            else:
                merged.append(span)
        return tuple(merged)
