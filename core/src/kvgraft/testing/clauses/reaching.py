"""Clauses that compare a reach with its definition in tokens (M1, E3, A4)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from kvgraft.reach import PageReach
from kvgraft.terms import Chunk, ChunkedLocal, Everything, Leading, Term, Trailing
from kvgraft.testing.clause import clause, expect
from kvgraft.testing.machine.deriving import numbers_of
from kvgraft.testing.subject import Subject

__all__ = ["boundaries"]

PAGE_SIZES = (1, 3, 4, 16)
"""Page sizes, in tokens, at which terms are asked: aligned with their numbers, and not."""

SHORT = 12
"""Every boundary up to this one is looked at, in pages."""

LONGEST = 20_000
"""Boundaries behind this one, in tokens, are left out: every token before one is asked."""


def _has_pages(subject: Subject) -> str | None:
    return "about pages; the component has states" if subject.is_state else None


def boundaries(terms: tuple[Term, ...], page_size: int) -> list[int]:
    """Page boundaries at which terms are looked at: the first ones, and where their numbers lie."""
    numbers = {number for term in terms for number in numbers_of(term)}
    marks = {number * times for number in numbers for times in (1, 2, 3)} | {sum(numbers)}
    near = {mark // page_size + step for mark in marks for step in (-1, 0, 1, 2)}
    wanted = {*range(SHORT), *(at for at in near if 0 < at <= LONGEST // page_size)}
    return sorted(wanted)


@cache
def _needed(term: Term, boundary: int) -> frozenset[int]:
    """Tokens the term needs at a boundary, both by number."""
    return frozenset(token for token in range(boundary) if term.needs(boundary, token))


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
        spans = term.pages(boundary, page_size)
        named = sorted({page for start, end in spans for page in range(start, end)})
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
            again = sorted(back - _needed(term, earlier))
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
                    lost = _needed(inner, boundary) - _needed(outer, boundary)
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
