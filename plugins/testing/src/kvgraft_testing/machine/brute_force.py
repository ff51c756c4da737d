"""Matching and reach by brute force.

Sequences are tuples of tokens, a page is named by all tokens up to its end, and a component's needs
at a boundary are found by checking every token. No tree, no spans, no shortcut; nothing here
imports the rest of kvgraft.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

__all__ = ["BruteForce", "Gone", "ModelComponent", "ModelTerm", "Prefix", "needed_tokens", "needs"]


class Gone(NamedTuple):
    """A namespace until it was cleared; a number distinguishes it from later ones."""

    namespace: object
    number: int


Prefix = tuple[object, tuple[int, ...]]
"""A namespace and all tokens up to a page's end: the identity of a page, or of a state."""

COMPARED_BOUNDARIES = 70
"""Boundaries at which two reaches are compared token by token; see `BruteForce.contains`."""


class ModelTerm(NamedTuple):
    """One term of a reach.

    Attributes:
        kind: `all`, `last` n, `first` n, the `chunk` of n of the token before the boundary, that of
            the token at it (`local`), the `state`, or a custom `term`.
        tokens: n; for a custom term the largest number in it.
        asked: for a custom term, whether a token is needed at a boundary.
    """

    kind: str
    tokens: int = 0
    asked: Callable[[int, int], bool] | None = None


@dataclass(frozen=True)
class ModelComponent:
    """The model's record of a component.

    Attributes:
        name: its name in the cache.
        parts: its reach.
        home_is_host: its canonical copy is on HOST.
        mirrored: whether it has host slots at all.
        slots_per_page: slots a page takes.
        can_copy: whether its states can be copied for a request that writes to them.
        stored_tokens: tokens from the start of a sequence that get slots.
        said_to_contain: components whose reach its own claims to contain; used if a reach has a
            custom term.
        own_copies: whether it builds its copies itself: then only a round trip shows that they are
            right.
    """

    name: str
    parts: tuple[ModelTerm, ...]
    home_is_host: bool = False
    mirrored: bool = True
    slots_per_page: int = 1
    can_copy: bool = True
    stored_tokens: float = math.inf
    said_to_contain: frozenset[str] = frozenset()
    own_copies: bool = False

    @property
    def is_state(self) -> bool:
        """Whether it holds a state at a boundary instead of pages."""
        return self.parts[0].kind == "state"

    @property
    def is_prefix_closed(self) -> bool:
        """Whether it needs every token before a boundary."""
        return any(part.kind == "all" for part in self.parts)

    def stored_pages(self, first: int, end: int, page_size: int) -> int:
        """Number of the pages `[first, end)` of a running request that get slots."""
        return sum(page * page_size < self.stored_tokens for page in range(first, end))


def needs(parts: Iterable[ModelTerm], boundary: int, token: int) -> bool:
    """Whether the data of the token at a position is needed to compute the one at `boundary`.

    A state at the boundary depends on the token before it, which stands for it here.
    """
    return any(
        kind == "all"
        or (kind == "last" and token >= boundary - size)
        or (kind == "first" and token < size)
        or (kind == "chunk" and token // size == (boundary - 1) // size)
        or (kind == "local" and token // size == boundary // size)
        or (kind == "state" and token == boundary - 1)
        or (asked is not None and asked(boundary, token))
        for kind, size, asked in parts
    )


@cache
def needed_tokens(parts: tuple[ModelTerm, ...], boundary: int) -> frozenset[int]:
    """Positions of the tokens whose data is needed to compute the token at `boundary`."""
    return frozenset(token for token in range(boundary) if needs(parts, boundary, token))


@cache
def _pages(parts: tuple[ModelTerm, ...], page_size: int, boundary: int) -> frozenset[int]:
    tokens = needed_tokens(parts, boundary * page_size)
    return frozenset(token // page_size for token in tokens)


@cache
def _contains(outer: tuple[ModelTerm, ...], inner: tuple[ModelTerm, ...]) -> bool:
    return all(
        needs(outer, boundary, token)
        for boundary, tokens in _questions(outer + inner)
        for token in tokens
        if needs(inner, boundary, token)
    )


@dataclass
class BruteForce:
    """The components of one cache and its page size."""

    page_size: int
    components: tuple[ModelComponent, ...]

    def component(self, name: str) -> ModelComponent:
        """The component of that name."""
        return next(each for each in self.components if each.name == name)

    def pages(self, component: ModelComponent, boundary: int) -> frozenset[int]:
        """Pages that hold a token the component needs at a boundary; pages count from 0.

        For a state the page that ends at the boundary.
        """
        return _pages(component.parts, self.page_size, boundary)

    def contains(self, outer: ModelComponent, inner: ModelComponent) -> bool:
        """Whether at every boundary `outer` needs all that `inner` needs.

        Every boundary and token is checked near the start, and where a size begins or ends.
        """
        if outer.is_state and not inner.is_state:
            return False
        if any(part.asked is not None for part in outer.parts + inner.parts):
            # A third party's term need not name the terms it contains; clauses check those it
            # names.
            return inner.name in outer.said_to_contain
        return _contains(outer.parts, inner.parts)

    def depends_on(self, component: ModelComponent) -> list[ModelComponent]:
        """Components without whose data on a page this one's is useless (T4).

        They are those that need every page, or else the base, which comes first, if their reach
        contains this one's and is not contained in it.
        """
        everything = [each for each in self.components if each.is_prefix_closed]
        return [
            other
            for other in everything or self.components[:1]
            if self.contains(other, component) and not self.contains(component, other)
        ]

    def prefix(self, namespace: object, tokens: tuple[int, ...], page: int) -> Prefix:
        """The identity of page number `page` of a sequence."""
        return (namespace, tokens[: (page + 1) * self.page_size])

    def page_of(self, prefix: Prefix) -> int:
        """The number of a page."""
        return len(prefix[1]) // self.page_size - 1

    def prefixes(self, component: ModelComponent, sequence: Prefix, boundary: int) -> list[Prefix]:
        """The pages of a sequence that the component needs at a boundary (in pages)."""
        return [self.prefix(*sequence, page) for page in sorted(self.pages(component, boundary))]

    def accepts(
        self, component: ModelComponent, present: set[Prefix], sequence: Prefix, boundary: int
    ) -> bool:
        """Whether all the component needs at a boundary is among the pages `present`."""
        return all(prefix in present for prefix in self.prefixes(component, sequence, boundary))

    def deepest(self, present: dict[str, set[Prefix]], sequence: Prefix, limit: int) -> int:
        """The deepest boundary, in pages and at most `limit`, that every component accepts."""
        for boundary in range(min(limit, len(sequence[1]) // self.page_size), 0, -1):
            if all(
                self.accepts(component, present[component.name], sequence, boundary)
                for component in self.components
            ):
                return boundary
        return 0


def _questions(parts: tuple[ModelTerm, ...]) -> Iterable[tuple[int, Iterable[int]]]:
    """Boundaries, and tokens at each, that tell reaches of these parts from one another."""
    sizes = {part.tokens for part in parts}
    for boundary in range(COMPARED_BOUNDARIES):
        yield boundary, range(boundary)
    marks = {0, *sizes, *(2 * size for size in sizes), sum(sizes), 2 * sum(sizes)}
    boundaries = {mark + near for mark in marks for near in range(4)}
    for boundary in sorted(boundaries - set(range(COMPARED_BOUNDARIES))):
        ends = {0, boundary, *sizes, *(boundary - size for size in sizes)}
        ends |= {at // size * size for size in sizes if size for at in (boundary - 1, boundary)}
        tokens = {end + near for end in ends for near in (-1, 0, 1)}
        yield boundary, sorted(token for token in tokens if 0 <= token < boundary)
