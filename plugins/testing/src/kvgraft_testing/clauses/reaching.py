"""Clauses that compare a reach with its definition in tokens (M1, E3, A4)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise

from kvgraft.reach import PageReach
from kvgraft.terms import Chunk, ChunkedLocal, Everything, Leading, Term, Trailing
from kvgraft.types import Span
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.machine.deriving import numbers_of
from kvgraft_testing.subject import Subject

__all__ = ["boundaries"]

PAGE_SIZES = (1, 3, 4, 16)
"""Page sizes, in tokens, at which terms are checked: aligned with their numbers, and not."""

SHORT = 12
"""Every boundary up to this one is checked, in pages."""

LONGEST = 20_000
"""Up to this boundary, in tokens, every token before one is checked; beyond it some of them."""

BETWEEN = (1_000, 4_099, 9_001)
"""Boundaries, in tokens, at which every term is checked for every token, whatever its numbers."""

BLOCK = 48
"""Tokens that are checked together: whole pages of all sizes."""

FAR = (700 * BLOCK, 2_731 * BLOCK, 5_462 * BLOCK)
"""Boundaries beyond `LONGEST` at which every term is checked, in tokens; the last is above 2^18."""

N_SPREAD = 24
"""Blocks that are checked before such a boundary, beside those at the needed tokens' ends."""


def _has_pages(subject: Subject) -> str | None:
    return "about pages; the component has states" if subject.is_state else None


def boundaries(terms: tuple[Term, ...], page_size: int) -> list[int]:
    """Page boundaries at which terms are checked: the first, fixed ones, and near their numbers."""
    numbers = {number for term in terms for number in numbers_of(term)}
    marks = {number * times for number in numbers for times in (1, 2, 3)} | {sum(numbers)}
    near = {mark // page_size + step for mark in marks for step in (-1, 0, 1, 2)}
    fixed = [boundary // page_size for boundary in (*BETWEEN, *FAR)]
    return sorted({*range(SHORT), *(at for at in near if 0 < at <= fixed[-1]), *fixed})


@cache
def _asked_tokens(term: Term, boundary: int) -> Sequence[int]:
    """Tokens to ask before a boundary, both by number: all, or blocks where it is far.

    These are the first and last ones, some in between, and those where the ranges of `pages` begin
    and end.
    """
    if boundary <= LONGEST:
        return range(boundary)
    n_blocks = -(-boundary // BLOCK)
    spans = sorted(term.pages(boundary, 1))
    edges = [edge // BLOCK for start, end in (*spans[:4], *spans[-4:]) for edge in (start, end - 1)]
    blocks = {0, 1, n_blocks - 2, n_blocks - 1}
    blocks |= {edge + step for edge in edges for step in (-1, 0, 1)}
    blocks |= {n_blocks * at // N_SPREAD + at for at in range(N_SPREAD)}
    return [
        token
        for block in sorted(blocks)
        for token in range(max(0, block * BLOCK), min((block + 1) * BLOCK, boundary))
    ]


@cache
def _needed(term: Term, boundary: int) -> frozenset[int]:
    """Tokens the term needs at a boundary, both by number; of those that are asked."""
    asked = _asked_tokens(term, boundary)
    return frozenset(token for token in asked if term.needs(boundary, token))


def _not_needed(term: Term, boundary: int, tokens: Iterable[int]) -> set[int]:
    """Those of `tokens` that the term does not need at a boundary."""
    if boundary <= LONGEST:
        return set(tokens) - _needed(term, boundary)
    return {token for token in tokens if not term.needs(boundary, token)}


def _asked(subject: Subject) -> Iterator[tuple[Term, int, int]]:
    """Every term of the reach, page sizes, and boundaries in pages."""
    for term in subject.reach.terms:
        for page_size in PAGE_SIZES:
            for boundary in boundaries((term,), page_size):
                yield term, page_size, boundary


@clause("M1", "A reach names the pages of the tokens it needs, and no others.", needs=_has_pages)
def a_reach_names_the_pages_of_its_tokens(subject: Subject) -> None:
    for term, page_size, boundary in _asked(subject):
        tokens = _needed(term, boundary * page_size)
        pages = sorted({token // page_size for token in tokens})
        asked = _asked_tokens(term, boundary * page_size)
        named = _named(term.pages(boundary, page_size), asked, page_size)
        expect(
            named == pages,
            "M1",
            subject,
            f"{term!r}.pages names {_ranges(named)} at boundary {boundary} with pages of "
            f"{page_size} tokens; its tokens are on {_ranges(pages)}",
        )


@clause("M1", "A reach only looks back: a page it left is not needed again.", needs=_has_pages)
def a_page_that_was_left_is_not_needed_again(subject: Subject) -> None:
    for term in subject.reach.terms:
        for earlier, later in pairwise(boundaries((term,), 1)):
            back = {token for token in _needed(term, later) if token < earlier}
            again = sorted(_not_needed(term, earlier, back))
            expect(
                not again,
                "M1",
                subject,
                f"{term!r} needs token {again and again[0]} at boundary {later} and not at "
                f"{earlier}, where a request that goes on to {later} may resume; a reach holds "
                "the data that all later tokens will read",
            )


@clause("M1", "A reach says truly whether it ends at every boundary.", needs=_has_pages)
def a_reach_ends_where_it_says(subject: Subject) -> None:
    for term in subject.reach.terms:
        for boundary in boundaries((term,), 1):
            if not boundary:
                continue
            needed = _needed(term, boundary)
            expect(
                not term.ends_at_boundary or boundary - 1 in needed,
                "M1",
                subject,
                f"{term!r}.ends_at_boundary, and at {boundary} the token before is not needed",
            )
            expect(
                max(needed, default=-1) < term.stored_tokens,
                "M1",
                subject,
                f"{term!r}.stored_tokens is {term.stored_tokens}; at {boundary} it needs token "
                f"{max(needed, default=-1)}",
            )


@clause("E3", "A reach contains another only if it needs all the other does.", needs=_has_pages)
def containment_holds_token_by_token(subject: Subject) -> None:
    for term in subject.reach.terms:
        others = [*subject.reach.terms, Everything()]
        for width in {1, 2, 3, 5, 8, *numbers_of(term)}:
            others += [Trailing(width), Leading(width), Chunk(width), ChunkedLocal(width + 1)]
        for other in others:
            for outer, inner in ((term, other), (other, term)):
                if not (outer.contains(inner) or inner.is_within(outer)):
                    continue
                for boundary in boundaries((outer, inner), 1):
                    lost = _not_needed(outer, boundary, _needed(inner, boundary))
                    expect(
                        not lost,
                        "E3",
                        subject,
                        f"{outer!r} is said to contain {inner!r}, which alone needs token "
                        f"{lost and min(lost)} at boundary {boundary}",
                    )


@clause("A4", "No boundary takes more pages than the reach's width there.", needs=_has_pages)
def a_width_is_not_exceeded(subject: Subject) -> None:
    for page_size in PAGE_SIZES:
        reach = PageReach(subject.reach, page_size)
        most = 0
        for boundary in boundaries(subject.reach.terms, page_size):
            most = max(most, sum(end - start for start, end in reach.spans(boundary)))
            expect(
                most <= reach.width(boundary),
                "A4",
                subject,
                f"up to boundary {boundary}, in pages of {page_size} tokens, {most} pages are "
                f"needed at once; the width is {reach.width(boundary)}",
            )


def _named(spans: Sequence[Span], asked: Sequence[int], page_size: int) -> list[int]:
    """Pages of `spans`, in any order, as far as their tokens are asked."""
    if isinstance(asked, range):
        return sorted({page for start, end in spans for page in range(start, end)})
    pages = sorted({token // page_size for token in asked})
    found: set[int] = set()
    for start, end in spans:
        found.update(pages[bisect_left(pages, start) : bisect_left(pages, end)])
    return sorted(found)


def _ranges(pages: list[int]) -> str:
    """Pages as ranges: `[0, 2) [5, 6)`; the first three."""
    found: list[list[int]] = []
    for page in pages:
        if found and found[-1][1] == page:
            found[-1][1] = page + 1
        else:
            found.append([page, page + 1])
    shown = " ".join(f"[{start}, {end})" for start, end in found[:3])
    return f"pages {shown or 'none'}{' ...' if len(found) > 3 else ''}"
