"""Reaches against their definition, token by token."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Chunk, ConfigError, Everything, Leading, Reach, StateAt, Trailing
from kvgraft.reach import PageReach, Term
from kvgraft.reach import _contains as term_contains
from kvgraft.tree.track import ComponentShape, ordered

LARGEST = 8
BOUNDARIES = range(1, LARGEST * LARGEST + 2)
"""Enough to see every alignment of two chunks of up to `LARGEST` tokens."""

sizes = st.integers(1, LARGEST)
sized = st.one_of(st.builds(Trailing, sizes), st.builds(Leading, sizes), st.builds(Chunk, sizes))
terms = st.one_of(st.just(Everything()), st.just(StateAt()), sized)
unions = (
    st.lists(st.one_of(st.just(Everything()), sized), min_size=1, max_size=3)
    .filter(lambda parts: not all(isinstance(part, Leading) for part in parts))
    .map(lambda parts: Reach(*parts))
)
reaches = st.one_of(unions, st.just(Reach(StateAt())))


def needed(term: Term, boundary: int) -> set[int]:
    """Tokens needed at a boundary; a state is of use where the token before it was computed."""
    if isinstance(term, Everything):
        return set(range(boundary))
    if isinstance(term, Trailing):
        return {token for token in range(boundary) if token >= boundary - term.tokens}
    if isinstance(term, Leading):
        return {token for token in range(boundary) if token < term.tokens}
    if isinstance(term, Chunk):
        return {t for t in range(boundary) if t // term.tokens == (boundary - 1) // term.tokens}
    return {boundary - 1}


def needed_by(reach: Reach, boundary: int) -> set[int]:
    return set().union(*(needed(term, boundary) for term in reach.terms))


def covers(outer: Reach, inner: Reach) -> bool:
    return all(needed_by(inner, at) <= needed_by(outer, at) for at in BOUNDARIES)


@given(outer=terms, inner=terms)
def test_one_term_contains_another_exactly_where_it_needs_all_the_other_needs(
    outer: Term, inner: Term
) -> None:
    if isinstance(outer, StateAt) and not isinstance(inner, StateAt):
        return
    covered = all(needed(inner, at) <= needed(outer, at) for at in BOUNDARIES)
    assert term_contains(outer, inner) == covered


@pytest.mark.parametrize("inner", [Trailing(1), Chunk(1)])
def test_a_state_contains_no_pages_not_even_the_last(inner: Term) -> None:
    assert not Reach(StateAt()).contains(Reach(inner))


@given(outer=reaches, inner=reaches)
def test_a_contained_union_needs_nothing_more_at_any_boundary(outer: Reach, inner: Reach) -> None:
    if outer.contains(inner):
        assert covers(outer, inner)


@given(one=reaches, two=reaches, three=reaches)
def test_containment_is_reflexive_and_transitive(one: Reach, two: Reach, three: Reach) -> None:
    assert one.contains(one)
    if one.contains(two) and two.contains(three):
        assert one.contains(three)


def test_sinks_and_a_larger_window_contain_one_another_in_neither_direction() -> None:
    sinks, window = Reach(Leading(4), Trailing(64)), Reach(Trailing(128))
    assert not sinks.contains(window)
    assert not window.contains(sinks)


@given(parts=st.lists(reaches, min_size=1, max_size=5))
def test_in_the_trees_order_whatever_contains_another_comes_before_it(parts: list[Reach]) -> None:
    order = ordered([ComponentShape(f"c{index}", reach) for index, reach in enumerate(parts)])
    for position, later in enumerate(order):
        for earlier in order[:position]:
            contained = later.reach.contains(earlier.reach)
            assert not contained or earlier.reach.contains(later.reach)


@given(parts=st.lists(reaches, min_size=2, max_size=4), random=st.randoms())
def test_the_trees_order_does_not_depend_on_how_components_are_listed(
    parts: list[Reach], random: object
) -> None:
    shapes = [ComponentShape(f"c{index}", reach) for index, reach in enumerate(parts)]
    shuffled = list(shapes)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ordered(shapes) == ordered(shuffled)


@given(reach=unions, page_size=st.integers(1, 5), boundary=st.integers(0, 30))
def test_spans_are_exactly_the_pages_that_hold_a_needed_token(
    reach: Reach, page_size: int, boundary: int
) -> None:
    pages = {token // page_size for token in needed_by(reach, boundary * page_size)}
    spans = PageReach(reach, page_size).spans(boundary)
    assert {page for span in spans for page in range(span.start, span.end)} == pages
    assert all(span.start < span.end for span in spans)
    assert all(one.end < two.start for one, two in pairwise(spans))


@given(reach=unions, page_size=st.integers(1, 5))
def test_no_boundary_takes_more_pages_than_the_widest(reach: Reach, page_size: int) -> None:
    pages = PageReach(reach, page_size)
    most = max(sum(end - start for start, end in pages.spans(at)) for at in range(40))
    assert pages.is_everything or most <= pages.widest_pages


def test_chunks_of_whole_pages_touch_no_page_more() -> None:
    assert PageReach(Reach(Chunk(8)), 4).widest_pages == 2
    assert PageReach(Reach(Chunk(6)), 4).widest_pages == 3


@pytest.mark.parametrize("terms", [(Leading(4),), (Leading(4), Leading(2))])
def test_a_reach_that_does_not_end_at_the_boundary_is_refused(terms: tuple[Term, ...]) -> None:
    with pytest.raises(ConfigError, match="does not end at the boundary; add a term that does"):
        Reach(*terms)


@pytest.mark.parametrize("boundary", [0, 1, 7])
def test_a_state_reaches_over_no_page(boundary: int) -> None:
    assert PageReach(Reach(StateAt()), 4).spans(boundary) == ()


def test_a_reach_is_printed_as_the_ranges_it_needs() -> None:
    assert str(Reach(Leading(4), Trailing(64))) == "[0, 4) + [b-64, b)"
    assert str(Reach(Chunk(8))) == "[floor((b-1)/8)*8, b)"
    assert str(Reach(StateAt())) == "state at b"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((), "no term given"),
        ((Trailing(0),), r"Trailing\(0\) needs at least 1 token"),
        ((Chunk(-3),), r"Chunk\(-3\) needs at least 1 token"),
        ((StateAt(), Trailing(4)), "stands alone"),
    ],
)
def test_a_reach_that_means_nothing_is_refused(parts: tuple[Term, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Reach(*parts)
