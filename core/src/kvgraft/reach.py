"""Reach: which tokens before a boundary a component needs in order to resume there.

A reach is data, a union of a few terms (`kvgraft.terms`). From it the core derives which boundaries
match, the pages of a pin, of a load-back and of an eviction, and a default budget; so no tree
operation calls into a component per node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgraft.errors import ConfigError, ContractViolation
from kvgraft.sizes import expect_count
from kvgraft.terms import Everything, StateAt, Term, Trailing
from kvgraft.types import Span, new_span

__all__ = ["PageReach", "Reach"]

FAR = 1 << 40
"""A boundary, in tokens, beyond every sequence: where the widths of reaches are compared."""


PROBED = ((0, 1), (1, 1), (7, 1), (100, 1), (1, 4), (5, 4), (70, 16))
"""Boundaries, in pages, and page sizes at which all answers of a new term are checked."""


def _check_term(term: object) -> None:
    """Refuse an object that is no term, or does not answer as one.

    Raises:
        ConfigError: with the term's name.
    """
    if not isinstance(term, Term):
        called = f"{term.__name__}, a class," if isinstance(term, type) else f"{term!r:.80}"
        raise ConfigError(
            f"reach: {called} is no term; give Everything(), Trailing(n), ... or an instance of a "
            "class derived from kvgraft.Term"
        )
    name = type(term).__name__
    try:
        hash(term)
        for boundary, page_size in PROBED:
            said = _answers(term, boundary, page_size)
            if said is not None:
                raise ConfigError(
                    f"reach: {name}.{said} at boundary {boundary}, pages of {page_size} tokens; "
                    "see kvgraft.Term"
                )
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # a component's code; it is named
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"reach: {name} raised {reason}") from error
    if type(term).__eq__ is object.__eq__ or repr(term) == object.__repr__(term):
        raise ConfigError(
            f"reach: {name} is no value: equal terms must compare equal and print alike in every "
            "process; make it a frozen dataclass"
        )


def _answers(term: Term, boundary: int, page_size: int) -> str | None:
    """The fault in a term's answers, in form or between `pages` and `needs`; None if none."""
    #   |pages(b)| <= width(b) <= b, and width never falls;   page in pages(b) <=> needs(b, a token)
    spans: object = term.pages(boundary, page_size)
    if not isinstance(spans, Sequence):
        return f"pages gives a {type(spans).__name__}, no sequence of page ranges; give a tuple"
    held: set[int] = set()
    try:
        _expect_pages(spans, boundary)
    except ValueError as error:
        return f"pages: {error}"
    for start, end in spans:
        held.update(range(start, end))
    width = term.width(boundary, page_size)
    if type(width) is not int or not len(held) <= width <= boundary:
        return (
            f"width is {width!r}; it is from {len(held)}, the pages needed, to the boundary's own"
        )
    said = _disagreement(term, boundary, page_size, held)
    if said is not None:
        return said
    ends: object = term.ends_at_boundary
    if not isinstance(ends, bool):
        return f"ends_at_boundary is {ends!r}"
    if not term.stored_tokens >= 1:
        return f"stored_tokens is {term.stored_tokens!r}"
    for far in (FAR // 2, FAR):
        widest: object = term.width(far, page_size)
        if type(widest) is not int or not width <= widest <= far:
            return f"width is {widest!r} at page {far}, and {width} before"
        width = widest
    return None


def _disagreement(term: Term, boundary: int, page_size: int, held: set[int]) -> str | None:
    """How `needs`, asked for every token, differs from `held`, the pages named; None if it agrees.

    A state names no pages.
    """
    needed: dict[int, int] = {}
    for token in range(boundary * page_size):
        said: object = term.needs(boundary * page_size, token)
        if not isinstance(said, bool):
            return f"needs answers {said!r} for token {token}"
        if said:
            needed.setdefault(token // page_size, token)
    differing = held ^ needed.keys()
    if not differing or isinstance(term, StateAt):
        return None
    page = min(differing)
    if page in needed:
        return f"pages leaves out page {page}, and needs asks for token {needed[page]} of it"
    return f"pages names page {page}, and needs asks for no token of it"


def _is_ours(term: Term) -> bool:
    return type(term).__module__ == Term.__module__


@dataclass(frozen=True, slots=True)
class Reach:
    """A union of terms.

    Args:
        terms: at least one; `StateAt` only alone (a state component holds nothing else).

    Raises:
        ConfigError: no term, something that is no `Term` or does not answer as one, a term whose
            `pages` and `needs` disagree at a near boundary, or `StateAt` beside other terms.
    """

    terms: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        object.__setattr__(self, "terms", terms)
        if not terms:
            raise ConfigError("reach: no term given; use Everything(), Trailing(n), ...")
        for term in terms:
            _check_term(term)
        if self.is_state and len(terms) > 1:
            raise ConfigError("reach: StateAt() stands alone; make the rest a second component")

    @property
    def is_state(self) -> bool:
        """Whether this is the reach of a state component."""
        return any(isinstance(term, StateAt) for term in self.terms)

    @property
    def is_prefix_closed(self) -> bool:
        """Whether every token before the boundary is needed."""
        return any(type(term) is Everything for term in self.terms)

    @property
    def is_everything(self) -> bool:
        """`is_prefix_closed` under the name that it had in 1.0; use that one."""
        return self.is_prefix_closed

    @property
    def ends_at_boundary(self) -> bool:
        """Whether the token before the boundary is needed at every boundary."""
        return any(term.ends_at_boundary for term in self.terms)

    @property
    def stored_tokens(self) -> float:
        """Tokens from the start of a sequence that get slots; see `Term`."""
        return max(term.stored_tokens for term in self.terms)

    @property
    def width_tokens(self) -> float:
        """Most tokens needed at any boundary; infinite where that grows with the sequence."""
        width = sum(term.width(FAR, 1) for term in self.terms)
        return width if width == sum(term.width(FAR // 2, 1) for term in self.terms) else math.inf

    def pages(self, boundary: int, page_size: int) -> tuple[Span, ...]:
        """Page ranges needed at a boundary, given in pages: disjoint, in order; none for a state.

        `acquire_component_lock` names at least these. Raises `ConfigError` for no whole numbers.
        """
        size = expect_count("Reach.pages: page_size", page_size, 1)
        return PageReach(self, size).spans(expect_count("Reach.pages: boundary", boundary))

    def width(self, boundary: int, page_size: int) -> int:
        """Most pages needed at any boundary up to this one, given in pages."""
        return min(boundary, sum(term.width(boundary, page_size) for term in self.terms))

    @property
    def fingerprint(self) -> str:
        """A text that identifies stored data of this reach, the same in every process (S8)."""
        return " + ".join(
            str(term) if _is_ours(term) else f"{type(term).__module__}.{term!r}"
            for term in self.terms
        )

    def contains(self, other: Reach) -> bool:
        """Whether this reach needs every token that `other` needs, at any boundary.

        This is the order of rule E3: data of a contained reach is useless on a node without the
        data of the containing one.
        """
        return all(
            any(mine.contains(term) or term.is_within(mine) for mine in self.terms)
            for term in other.terms
        )

    def __str__(self) -> str:
        return " + ".join(str(term) for term in self.terms)


class PageReach:
    """A reach rounded outwards to whole pages.

    Args:
        reach: the reach.
        page_size: tokens per page.
        component: whose reach it is, for messages.

    Attributes:
        reach, page_size, component: as given.
        is_state, is_prefix_closed, ends_at_boundary: see `Reach`.
        trusted: whether all terms are the core's own, whose spans need no check.
        window_pages: for a single `Trailing` term its pages, else None (a fast path).
        stored_pages: pages from the start of a sequence that get slots.
    """

    __slots__ = (
        "component",
        "ends_at_boundary",
        "is_prefix_closed",
        "is_state",
        "page_size",
        "reach",
        "stored_pages",
        "trusted",
        "window_pages",
    )

    def __init__(self, reach: Reach, page_size: int, component: str | None = None) -> None:
        self.component = component
        self.trusted = all(map(_is_ours, reach.terms))
        self.reach = reach
        self.page_size = page_size
        self.is_state = reach.is_state
        self.is_prefix_closed = reach.is_prefix_closed
        self.ends_at_boundary = reach.ends_at_boundary
        stored = min(reach.stored_tokens, FAR)
        self.stored_pages = math.ceil(stored / page_size)
        self.window_pages: int | None = None
        if len(reach.terms) == 1 and type(reach.terms[0]) is Trailing:
            self.window_pages = -(-reach.terms[0].tokens // page_size)

    def width(self, boundary: int) -> int:
        """Most pages needed at any boundary up to this one (in pages); 0 for a state."""
        if self.window_pages is not None:
            return min(boundary, self.window_pages)
        try:
            return self.reach.width(boundary, self.page_size)
        except Exception as error:  # a component's code; it is named
            raise self._failed("width", boundary, error) from error

    def spans(self, boundary: int) -> tuple[Span, ...]:
        """Disjoint page ranges needed at `boundary` (in pages), in order; empty for a state."""
        if self.is_state or boundary == 0:
            return ()
        if self.window_pages is not None:
            start = boundary - self.window_pages
            return (new_span((start if start > 0 else 0, boundary)),)
        if self.is_prefix_closed:
            return (new_span((0, boundary)),)
        size = self.page_size
        try:
            named = [span for term in self.reach.terms for span in term.pages(boundary, size)]
            if not self.trusted:
                _expect_pages(named, boundary)
        except Exception as error:  # a component's code; it is named
            raise self._failed("pages", boundary, error) from error
        merged: list[Span] = []
        for start, end in sorted(named):
            if start >= end:
                continue
            if merged and start <= merged[-1].end:
                merged[-1] = Span(merged[-1].start, max(merged[-1].end, end))
            else:
                merged.append(Span(start, end))
        return tuple(merged)

    def _failed(self, method: str, boundary: int, error: Exception) -> ContractViolation:
        said = f"{type(error).__name__}: {error}"
        return ContractViolation(
            "M1",
            self.component,
            f"its reach {self.reach} has no {method} at boundary {boundary}, pages of "
            f"{self.page_size} tokens: {said}",
        )


def _expect_pages(spans: Sequence[Any], boundary: int) -> None:
    """Refuse anything but ranges of pages inside `[0, boundary)`.

    Raises:
        ValueError: with the first one.
    """
    for span in spans:
        start, end = span
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= boundary:
            raise ValueError(f"{span!r} is no range of pages inside [0, {boundary})")
