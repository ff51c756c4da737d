"""Terms: the rules a reach is a union of.

    Everything()          [0, b)                      full attention
    Trailing(n)           [b - n, b)                  sliding window
    Leading(n)            [0, n)                      attention sinks; alone, a prompt's head
    ChunkedLocal(n)       [floor(b/n)*n, b)           chunked-local attention: empty at multiples
                                                      of n, where a new chunk begins
    Chunk(n)              [floor((b-1)/n)*n, b)       the same, but at multiples of n the whole
                                                      chunk that just ended
    StateAt()             the state exactly at b      SSM and other recurrent states

For other patterns derive your own term from `Term`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvgraft.errors import ConfigError
from kvgraft.types import Span

__all__ = ["Chunk", "ChunkedLocal", "Everything", "Leading", "StateAt", "Term", "Trailing"]


class Term(ABC):
    """One part of a reach: a rule that names the tokens needed at any boundary.

    Derive a frozen dataclass from it to declare a pattern that the core does not know. A term is a
    value: it is hashable, equal terms name the same tokens, and its answers depend on nothing but
    its fields and the arguments.

    A request that resumes at a boundary goes on to later ones. So a boundary needs every token
    before it that a later boundary needs. The contract suite checks this, and compares every answer
    with `needs` (rules M1, E3 and A4).
    """

    __slots__ = ()

    @abstractmethod
    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        """Pages that hold a token needed at a boundary.

        Called several times per request and never per node; O(spans) is expected.

        Args:
            boundary: in pages of `page_size` tokens, so at token `boundary * page_size`.
            page_size: tokens per page.

        Returns:
            Page ranges inside `[0, boundary)`, in any order; empty ones are left out by the core.
        """

    @abstractmethod
    def width(self, boundary: int, page_size: int) -> int:
        """Most pages that `pages` names at any boundary up to this one; O(1).

        A larger answer reserves more than is used; it is at most `boundary`.
        """

    @abstractmethod
    def needs(self, boundary: int, token: int) -> bool:
        """Whether the data of token number `token` is needed at token number `boundary`.

        The definition of the term, written without pages: the contract suite derives the other
        methods' expected answers from it. `token` is less than `boundary`.
        """

    def contains(self, other: Term) -> bool:
        """Whether, at every boundary, this term needs all that `other` needs (E3).

        Say yes only if that is certain: data of a contained reach is evicted together with that of
        the containing one.
        """
        return self == other

    def is_within(self, other: Term) -> bool:
        """Whether `other` needs all that this term needs, for an `other` that does not know it."""
        del other
        return False

    @property
    def ends_at_boundary(self) -> bool:
        """Whether the token before the boundary is needed at every boundary.

        Every cache needs a component with such a reach: its data shows how far a sequence was
        computed.
        """
        return False

    @property
    def stored_tokens(self) -> float:
        """Tokens from the start of a sequence that get slots; infinite for all of them.

        No boundary needs data of later tokens; it is not kept even while they are computed.
        """
        return math.inf


def _check_sizes(term: Term, least: int, *sizes: int) -> None:
    for size in sizes:
        if type(size) is not int or size < least:
            unit = "token" if least == 1 else "tokens"
            raise ConfigError(
                f"reach: {type(term).__name__}({size!r}) needs at least {least} {unit}"
            )


@dataclass(frozen=True, slots=True)
class Everything(Term):
    """All tokens before the boundary."""

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        return (Span(0, boundary),)

    def width(self, boundary: int, page_size: int) -> int:
        return boundary

    def needs(self, boundary: int, token: int) -> bool:
        return True

    def contains(self, other: Term) -> bool:
        return True

    @property
    def ends_at_boundary(self) -> bool:
        """It does."""
        return True

    def __str__(self) -> str:
        return "[0, b)"


@dataclass(frozen=True, slots=True)
class Trailing(Term):
    """The last `tokens` tokens before the boundary."""

    tokens: int

    def __post_init__(self) -> None:
        _check_sizes(self, 1, self.tokens)

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        return (Span(max(0, boundary + -self.tokens // page_size), boundary),)

    def width(self, boundary: int, page_size: int) -> int:
        return min(boundary, -(-self.tokens // page_size))

    def needs(self, boundary: int, token: int) -> bool:
        return boundary - token <= self.tokens

    def contains(self, other: Term) -> bool:
        if isinstance(other, ChunkedLocal):
            return other.tokens - 1 <= self.tokens
        return isinstance(other, (Trailing, Chunk)) and other.tokens <= self.tokens

    @property
    def ends_at_boundary(self) -> bool:
        """It does."""
        return True

    def __str__(self) -> str:
        return f"[b-{self.tokens}, b)"


@dataclass(frozen=True, slots=True)
class Leading(Term):
    """The first `tokens` tokens of the sequence.

    Alone it is for data of a prompt's head that every later boundary needs: pages behind it take no
    slots.
    """

    tokens: int

    def __post_init__(self) -> None:
        _check_sizes(self, 1, self.tokens)

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        return (Span(0, self.width(boundary, page_size)),)

    def width(self, boundary: int, page_size: int) -> int:
        return min(boundary, -(-self.tokens // page_size))

    def needs(self, boundary: int, token: int) -> bool:
        return token < self.tokens

    def contains(self, other: Term) -> bool:
        return isinstance(other, Leading) and other.tokens <= self.tokens

    @property
    def stored_tokens(self) -> float:
        """The first ones."""
        return self.tokens

    def __str__(self) -> str:
        return f"[0, {self.tokens})"


@dataclass(frozen=True, slots=True)
class ChunkedLocal(Term):
    """The tokens before the boundary that are in the chunk of the token at the boundary.

    The rule of chunked-local attention in Llama 4. At multiples of `tokens` a new chunk begins and
    nothing is needed, so a cache also needs a component that ends at the boundary.
    """

    tokens: int

    def __post_init__(self) -> None:
        _check_sizes(self, 2, self.tokens)

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        at = boundary * page_size
        start = at // self.tokens * self.tokens
        return (Span(start // page_size, boundary),) if start < at else ()

    def width(self, boundary: int, page_size: int) -> int:
        whole, rest = divmod(self.tokens, page_size)
        return min(boundary, whole + 2 if rest else whole - 1)

    def needs(self, boundary: int, token: int) -> bool:
        return token // self.tokens == boundary // self.tokens

    def contains(self, other: Term) -> bool:
        return isinstance(other, ChunkedLocal) and self.tokens % other.tokens == 0

    def __str__(self) -> str:
        return f"[floor(b/{self.tokens})*{self.tokens}, b)"


@dataclass(frozen=True, slots=True)
class Chunk(Term):
    """The tokens before the boundary that are in the chunk of the last of them.

    At multiples of `tokens` that is the whole chunk that just ended, one more than chunked-local
    attention reads there; `ChunkedLocal` is empty at multiples.
    """

    tokens: int

    def __post_init__(self) -> None:
        _check_sizes(self, 1, self.tokens)

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        if not boundary:
            return ()
        start = (boundary * page_size - 1) // self.tokens * self.tokens
        return (Span(start // page_size, boundary),)

    def width(self, boundary: int, page_size: int) -> int:
        return min(boundary, -(-self.tokens // page_size) + (self.tokens % page_size > 0))

    def needs(self, boundary: int, token: int) -> bool:
        return token // self.tokens == (boundary - 1) // self.tokens

    def contains(self, other: Term) -> bool:
        if isinstance(other, ChunkedLocal) and other.tokens == 2:
            return True  # the other needs the last token or nothing
        if isinstance(other, (Chunk, ChunkedLocal)):
            return self.tokens % other.tokens == 0
        return isinstance(other, Trailing) and other.tokens == 1

    @property
    def ends_at_boundary(self) -> bool:
        """It does."""
        return True

    def __str__(self) -> str:
        return f"[floor((b-1)/{self.tokens})*{self.tokens}, b)"


@dataclass(frozen=True, slots=True)
class StateAt(Term):
    """The state exactly at the boundary; the one term that names no pages."""

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        return ()

    def width(self, boundary: int, page_size: int) -> int:
        return 0

    def needs(self, boundary: int, token: int) -> bool:
        # A state is a function of all tokens before it; the last one represents them.
        return token == boundary - 1

    def is_within(self, other: Term) -> bool:
        return other.ends_at_boundary

    @property
    def ends_at_boundary(self) -> bool:
        """It does: the state was computed from all tokens before it."""
        return True

    def __str__(self) -> str:
        return "state at b"
