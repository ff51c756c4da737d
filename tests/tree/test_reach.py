"""Reaches against their definition, token by token."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvgraft import (
    Chunk,
    ChunkedLocal,
    ConfigError,
    ContractViolation,
    Everything,
    Leading,
    Reach,
    Span,
    StateAt,
    Term,
    Tier,
    Trailing,
)
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.reach import PageReach
from kvgraft.tree.component import ComponentShape, ordered
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.tree import Tree

from ..model.patterns import Strided

LARGEST = 8
BOUNDARIES = range(1, LARGEST * LARGEST + 2)
"""Enough to see every alignment of two chunks of up to `LARGEST` tokens."""

sizes = st.integers(1, LARGEST)
ending = st.one_of(st.builds(Trailing, sizes), st.builds(Chunk, sizes))
sized = st.one_of(
    ending, st.builds(Leading, sizes), st.builds(ChunkedLocal, st.integers(2, LARGEST))
)
terms = st.one_of(st.just(Everything()), st.just(StateAt()), sized)
unions = st.lists(st.one_of(st.just(Everything()), sized), min_size=1, max_size=3).map(
    lambda parts: Reach(*parts)
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
    if isinstance(term, ChunkedLocal):
        return {t for t in range(boundary) if t // term.tokens == boundary // term.tokens}
    if isinstance(term, Chunk):
        return {t for t in range(boundary) if t // term.tokens == (boundary - 1) // term.tokens}
    return {boundary - 1}


def needed_by(reach: Reach, boundary: int) -> set[int]:
    return set().union(*(needed(term, boundary) for term in reach.terms))


def covers(outer: Reach, inner: Reach) -> bool:
    return all(needed_by(inner, at) <= needed_by(outer, at) for at in BOUNDARIES)


@example(outer=Chunk(3), inner=ChunkedLocal(2))
@given(outer=terms, inner=terms)
def test_one_term_contains_another_exactly_where_it_needs_all_the_other_needs(
    outer: Term, inner: Term
) -> None:
    if isinstance(outer, StateAt) and not isinstance(inner, StateAt):
        return
    covered = all(needed(inner, at) <= needed(outer, at) for at in BOUNDARIES)
    assert Reach(outer).contains(Reach(inner)) == covered


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


def shapes_of(reaches: list[Reach]) -> list[ComponentShape]:
    """Components of these reaches, and a window, since some may not end at every boundary."""
    named = [ComponentShape(f"c{index}", reach) for index, reach in enumerate(reaches)]
    return [*named, ComponentShape("window", Reach(Trailing(2)))]


@given(parts=st.lists(reaches, min_size=1, max_size=5))
def test_in_the_trees_order_a_component_comes_before_those_it_contains(parts: list[Reach]) -> None:
    order = ordered(shapes_of(parts))
    assert order[0].reach.ends_at_boundary
    for position, later in enumerate(order):
        for earlier in order[:position]:
            contained = later.reach.contains(earlier.reach)
            assert not contained or earlier.reach.contains(later.reach)


@given(parts=st.lists(reaches, min_size=2, max_size=4), random=st.randoms())
def test_the_trees_order_does_not_depend_on_how_components_are_listed(
    parts: list[Reach], random: object
) -> None:
    shapes = shapes_of(parts)
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
def test_no_boundary_takes_more_pages_than_the_width(reach: Reach, page_size: int) -> None:
    pages = PageReach(reach, page_size)
    most = 0
    for at in range(40):
        most = max(most, sum(end - start for start, end in pages.spans(at)))
        assert most <= pages.width(at) <= at


@pytest.mark.parametrize(
    ("reach", "width"), [(Chunk(8), 2), (Chunk(6), 3), (ChunkedLocal(8), 1), (Trailing(5), 2)]
)
def test_chunks_of_whole_pages_touch_no_page_more(reach: Term, width: int) -> None:
    assert PageReach(Reach(reach), 4).width(40) == width


@given(term=st.one_of(st.just(Everything()), sized), boundary=st.integers(1, 40))
def test_a_term_ends_at_every_boundary_or_says_that_it_does_not(term: Term, boundary: int) -> None:
    assert not term.ends_at_boundary or boundary - 1 in needed(term, boundary)
    assert max(needed(term, boundary), default=0) < term.stored_tokens


@pytest.mark.parametrize("reach", [Reach(Leading(4)), Reach(ChunkedLocal(8), Leading(2))])
def test_components_are_refused_unless_one_ends_at_every_boundary(reach: Reach) -> None:
    with pytest.raises(ConfigError, match="leaves out the token before some boundaries; put it "):
        ordered([ComponentShape("head", reach)])


@pytest.mark.parametrize("boundary", [4, 8, 400])
def test_at_a_multiple_a_chunk_is_needed_whole_and_a_local_one_not_at_all(boundary: int) -> None:
    assert PageReach(Reach(Chunk(4)), 2).spans(boundary // 2) == (
        Span(boundary // 2 - 2, boundary // 2),
    )
    assert PageReach(Reach(ChunkedLocal(4)), 2).spans(boundary // 2) == ()


class Lookalike:
    """It answers everything a term does, and is none: nobody said that it keeps their promises."""

    tokens = 512


class Silent(Term):
    """It names no pages."""

    def pages(self, boundary: int, page_size: int) -> list[Span]:
        raise KeyError(boundary)

    def width(self, boundary: int, page_size: int) -> int:
        return boundary

    def needs(self, boundary: int, token: int) -> bool:
        return True


class Beyond(Silent):
    """It names a page behind the boundary."""

    def pages(self, boundary: int, page_size: int) -> list[Span]:
        return [Span(0, boundary + 1)]


class Narrow(Silent):
    """It needs more pages than it is wide."""

    def pages(self, boundary: int, page_size: int) -> list[Span]:
        return [Span(0, boundary)]

    def width(self, boundary: int, page_size: int) -> int:
        return 0


@dataclass(frozen=True)
class Careless(Trailing):
    """It names no pages."""

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        return ()


@dataclass(frozen=True)
class Generous(Trailing):
    """It names a page more than its tokens are on."""

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        return Trailing(self.tokens + page_size).pages(boundary, page_size)

    def width(self, boundary: int, page_size: int) -> int:
        return boundary


class Late(Term):
    """Behind page 200 it names a page that is none."""

    def __repr__(self) -> str:
        return "Late()"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Late)

    def __hash__(self) -> int:
        return 1

    def pages(self, boundary: int, page_size: int) -> list[Span]:
        return [Span(0, boundary if boundary < 200 else boundary // 0)]

    def width(self, boundary: int, page_size: int) -> int:
        return boundary

    def needs(self, boundary: int, token: int) -> bool:
        return True


def test_a_term_that_fails_at_a_boundary_breaks_a_rule_under_its_components_name() -> None:
    pages = PageReach(Reach(Late()), 16, "mine")
    assert pages.spans(199) == (Span(0, 199),)
    with pytest.raises(ContractViolation, match=r"'mine'.*no pages at boundary 200") as caught:
        pages.spans(200)
    assert caught.value.rule == "M1"


@dataclass(frozen=True)
class Nearer(Trailing):
    """A window of its own that prints like the core's."""


def test_a_reach_of_ones_own_has_a_fingerprint_of_its_own() -> None:
    assert Reach(Trailing(8)).fingerprint == str(Reach(Trailing(8)))
    assert Reach(Nearer(8)).fingerprint.endswith("test_reach.Nearer(tokens=8)")


class Unhashable(Beyond):
    """It cannot be compared by value."""

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Lookalike(), "Lookalike object at .* is no term; give Everything"),
        (Trailing, "Trailing, a class, is no term"),
        (512, "512 is no term"),
        (Silent(), "Silent raised KeyError: 0"),
        (Beyond(), r"Beyond.pages: Span\(start=0, end=1\) is no range of pages inside"),
        (
            Narrow(),
            "Narrow.width is 0; it is from 1, the pages needed, to the boundary's own at",
        ),
        (
            Careless(512),
            "Careless.pages leaves out page 0, and needs asks for token 0 of it at boundary 1,",
        ),
        (
            Generous(6),
            "Generous.pages names page 0, and needs asks for no token of it at boundary 7, pages "
            "of 1 tokens; see kvgraft.Term",
        ),
        (Unhashable(), "Unhashable raised TypeError: unhashable type"),
    ],
)
def test_something_that_is_no_term_is_refused_by_name(term: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Reach(Everything(), term)  # type: ignore[arg-type]


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
        ((StateAt(), Trailing(4)), "stands alone"),
    ],
)
def test_a_reach_that_means_nothing_is_refused(parts: tuple[Term, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Reach(*parts)


@pytest.mark.parametrize(
    ("term", "size", "least"),
    [(Trailing, 0, "1 token"), (Chunk, -3, "1 token"), (ChunkedLocal, 1, "2 tokens")],
)
def test_a_term_of_no_tokens_is_refused(term: type[Trailing], size: int, least: str) -> None:
    with pytest.raises(ConfigError, match=rf"{term.__name__}\({size}\) needs at least {least}"):
        term(size)


@dataclass(frozen=True, slots=True)
class NamedState(StateAt):
    """A state with a name of its own."""


class Identity(Term):
    """A term of which no two are equal."""

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        return (Span(0, boundary),)

    def width(self, boundary: int, page_size: int) -> int:
        return boundary

    def needs(self, boundary: int, token: int) -> bool:
        return True


def test_a_term_derived_from_a_state_is_a_state() -> None:
    """It names no pages either: as anything else it would need nothing."""
    assert Reach(NamedState()).is_state
    with pytest.raises(ConfigError, match=r"StateAt\(\) stands alone"):
        Reach(NamedState(), Trailing(4))


def test_a_term_that_is_no_value_is_refused() -> None:
    """Printed, it would name an address in memory, and storage would find nothing again (S8)."""
    with pytest.raises(ConfigError, match=r"Identity is no value: .* frozen dataclass"):
        Reach(Identity())


@dataclass(frozen=True)
class Odd(Trailing):
    """A window whose pages come in an odd way."""

    way: str = ""

    def pages(self, boundary: int, page_size: int) -> Any:
        if self.way == "iterator":
            return iter(super().pages(boundary, page_size))
        raise SystemExit(3) if self.way == "exit" else ValueError("two\nlines")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ("lines", "Odd raised ValueError: two lines"),
        ("exit", "Odd raised SystemExit: 3"),
        (
            "iterator",
            "Odd.pages gives a tuple_iterator, no sequence of page ranges; give a tuple at "
            "boundary 0, pages of 1 tokens; see kvgraft.Term",
        ),
    ],
)
def test_a_term_that_fails_when_it_is_asked_is_named_in_one_line(way: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        Reach(Odd(4, way))
    assert str(refused.value) == f"reach: {said}"


@pytest.mark.parametrize("reach", [Reach(Strided(8, 1)), Reach(Leading(4), Trailing(64))])
def test_the_remembered_pages_of_a_reach_take_little_memory(reach: Reach) -> None:
    shape = ComponentShape("striding", reach)
    tree = Tree(4, [shape], {"striding": Ledger("striding", Tier.DEVICE, SlotAllocator(8))}, {})
    (component,) = tree.components
    assert component.segment_at(40) == component.reach_pages.spans(40)
    tracemalloc.start()
    for boundary in range(400, 464):
        component.segment_at(boundary)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000
