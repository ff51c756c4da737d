"""Reaches written outside the core: sound ones pass the suite, wrong ones break a rule by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvgraft_swa.plugin
from kvgraft import (
    Cache,
    CacheConfig,
    ChunkedLocal,
    Component,
    ConfigError,
    ContractViolation,
    Everything,
    GuardMode,
    Leading,
    LockQuery,
    Reach,
    Span,
    Term,
    TokenKey,
    Trailing,
    hookimpl,
)
from kvgraft.packages.registry import Plugin, load_plugin
from kvgraft_testing import Status, check_component
from kvgraft_testing.clauses import reaching
from kvgraft_testing.machine import paged_plugin
from kvgraft_testing.profiles import PROFILES
from kvgraft_testing.subject import Subject

from ..commands import KVGRAFT
from ..model.patterns import BlockSparse, Strided
from ..mutants.packages import paged
from ..packages.distributions import COMPONENT, Shelf


@dataclass(frozen=True, slots=True)
class Forgets(Strided):
    """It leaves the summaries out of its pages where these are of three tokens."""

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        spans = Strided.pages(self, boundary, page_size)
        return spans[:1] if page_size == 3 else spans


@dataclass(frozen=True, slots=True)
class Returns(Term):
    """Every third token, counted from the boundary: tokens left are needed again."""

    every: int

    def needs(self, boundary: int, token: int) -> bool:
        return (boundary - 1 - token) % self.every == 0

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        tokens = range(boundary * page_size - 1, -1, -self.every)
        return [Span(token // page_size, token // page_size + 1) for token in tokens]

    def width(self, boundary: int, page_size: int) -> int:
        return boundary


@dataclass(frozen=True, slots=True)
class Slim(Strided):
    """Its width is one page where pages are of three tokens."""

    def width(self, boundary: int, page_size: int) -> int:
        return min(1, boundary) if page_size == 3 else Strided.width(self, boundary, page_size)


@dataclass(frozen=True, slots=True)
class Greedy(Strided):
    """It says that it contains every window."""

    def contains(self, other: Term) -> bool:
        return isinstance(other, Trailing) or self == other


@dataclass(frozen=True, slots=True)
class Endless(BlockSparse):
    """It says that it ends at every boundary, and needs nothing of a block that begins."""

    @property
    def ends_at_boundary(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Cut(BlockSparse):
    """It says that nothing behind the first tokens is stored."""

    @property
    def stored_tokens(self) -> float:
        return self.block


@dataclass(frozen=True, slots=True)
class Overlooks(Trailing):
    """It needs a token far from its own numbers, which is on no page that it names."""

    def needs(self, boundary: int, token: int) -> bool:
        return token == 3_777 or Trailing.needs(self, boundary, token)


FAR_TOKENS = 20_000
"""Behind this many tokens the next ones are wrong; before, all are right."""


@dataclass(frozen=True, slots=True)
class ForgetsFar(Trailing):
    """Far behind, a token of its window is on no page that it names."""

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        (span,) = Trailing.pages(self, boundary, page_size)
        lost = boundary * page_size > FAR_TOKENS and span.end - span.start > 1
        return [Span(span.start + lost, span.end)]


@dataclass(frozen=True, slots=True)
class CapsFar(Everything):
    """It names no page behind a number that fits 17 bits."""

    def pages(self, boundary: int, page_size: int) -> Sequence[Span]:
        return [Span(0, min(boundary, 1 << 17))]


@dataclass(frozen=True, slots=True)
class ReturnsFar(Strided):
    """Far behind, the window is twice as wide: tokens left are needed again."""

    def needs(self, boundary: int, token: int) -> bool:
        if boundary > FAR_TOKENS:
            return boundary - token <= 40_000
        return Strided.needs(self, boundary, token)


@dataclass(frozen=True, slots=True)
class GreedyFar(Leading):
    """It says that it contains every window; it does so until a window has left the head."""

    def contains(self, other: Term) -> bool:
        return isinstance(other, Trailing) or self == other


@dataclass(frozen=True, slots=True)
class EndsFar(Everything):
    """Far behind, the token before a boundary is not needed."""

    def needs(self, boundary: int, token: int) -> bool:
        return boundary <= FAR_TOKENS or token < boundary - 1


@dataclass(frozen=True, slots=True)
class SlimFar(Everything):
    """Its width grows no further than to a number of 17 bits."""

    def width(self, boundary: int, page_size: int) -> int:
        return min(boundary, 1 << 17)


WRONG = {
    "pages are left out": (Forgets(6, 2), reaching.a_reach_names_the_pages_of_its_tokens, "M1"),
    "a token between is left out": (
        *(Overlooks(10), reaching.a_reach_names_the_pages_of_its_tokens),
        "M1",
    ),
    "pages come back": (Returns(3), reaching.a_page_that_was_left_is_not_needed_again, "M1"),
    "width is too small": (Slim(6, 2), reaching.a_width_is_not_exceeded, "A4"),
    "contains too much": (Greedy(6, 2), reaching.containment_holds_token_by_token, "E3"),
    "ends before": (Endless(4, 1), reaching.a_reach_ends_where_it_says, "M1"),
    "pages are left out far behind": (
        *(ForgetsFar(64), reaching.a_reach_names_the_pages_of_its_tokens),
        "M1",
    ),
    "pages are capped far behind": (
        *(CapsFar(), reaching.a_reach_names_the_pages_of_its_tokens),
        "M1",
    ),
    "pages come back far behind": (
        *(ReturnsFar(6, 2), reaching.a_page_that_was_left_is_not_needed_again),
        "M1",
    ),
    "contains too much far behind": (
        *(GreedyFar(FAR_TOKENS), reaching.containment_holds_token_by_token),
        "E3",
    ),
    "ends before far behind": (EndsFar(), reaching.a_reach_ends_where_it_says, "M1"),
    "width is too small far behind": (SlimFar(), reaching.a_width_is_not_exceeded, "A4"),
    "stores too little": (Cut(4, 2), reaching.a_reach_ends_where_it_says, "M1"),
}


def plugin(term: Term) -> Plugin:
    return load_plugin("mutant", paged(reach=Reach(term)).implementation("mutant"))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", WRONG)
def test_a_term_that_contradicts_its_definition_breaks_a_rule(case: str) -> None:
    term, clause, rule = WRONG[case]
    with pytest.raises(ContractViolation) as caught:
        clause(Subject(plugin(term), {}, PROFILES["dev"]))
    assert caught.value.rule == rule
    assert type(term).__name__ in str(caught.value) or rule == "A4"


SOUND = [Strided(6, 2), BlockSparse(4, 2), BlockSparse(5, 1), ChunkedLocal(6), Leading(3)]


@pytest.mark.one_in(9)
@pytest.mark.parametrize("term", SOUND, ids=str)
@pytest.mark.parametrize("clause", ["pages", "back", "ends", "contains", "width"])
def test_sound_terms_pass(term: Term, clause: str) -> None:
    checks = {
        "pages": reaching.a_reach_names_the_pages_of_its_tokens,
        "back": reaching.a_page_that_was_left_is_not_needed_again,
        "ends": reaching.a_reach_ends_where_it_says,
        "contains": reaching.containment_holds_token_by_token,
        "width": reaching.a_width_is_not_exceeded,
    }
    checks[clause](Subject(plugin(term), {}, PROFILES["dev"]))


@pytest.mark.long
@pytest.mark.parametrize("term", SOUND, ids=str)
def test_components_of_sound_terms_pass_the_whole_suite(term: Term) -> None:
    results = check_component("mutant", plugin=plugin(term), profile="dev")
    assert [str(each) for each in results if each.status is Status.FAILED] == []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("check", "thrown", "--profile", "dev"), marks=pytest.mark.long, id="check"),
        pytest.param(
            ("replay", "--synthetic", "chat", "--requests", "3", "--component", "thrown"),
            id="replay",
        ),
    ],
)
def test_a_component_with_a_term_of_no_kind_is_refused_by_its_name(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    """The core must not take an unknown term for one that needs nothing."""
    source = COMPONENT.format(name="thrown").replace(
        "Reach(Everything())", "Reach(type('MyTerm', (), {'tokens': 512})())"
    )
    shelf = Shelf(tmp_path)
    shelf.put("kvgraft-thrown", source)
    done = shelf.run(KVGRAFT, *command)
    assert done.returncode != 0
    assert "component 'thrown': reach: " in done.stdout + done.stderr
    assert "MyTerm" in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_a_head_every_boundary_needs_takes_one_page_of_its_pool() -> None:
    """A blob that belongs to the start of a prompt, such as an encoder's output."""
    head = paged_plugin("head", Reach(Leading(1)))
    config = CacheConfig(
        components={"full": {"n_layers": 1}, "head": {"device_tokens": 3 * 16}},
        page_size=16,
        device_tokens=64 * 16,
        host_tokens=0,
        load=None,
    )
    cache = Cache(config, plugins=[head])
    try:
        key = TokenKey(range(500))
        request = cache.begin(key, reserve=20)
        assert cache.admit(request).admitted
        assert cache.allocate(request, 500)
        assert (cache.table(request, "head") >= 0).tolist() == [True] + 31 * [False]
        cache.computed(request, 500)
        cache.finish(request)
        again = cache.begin(TokenKey(range(500)))
        assert again.anchor_tokens == 496
        cache.abort(again)
        assert cache.evict("head", 3) == 1
        gone = cache.begin(TokenKey(range(500)))
        assert gone.anchor_tokens == 0
        cache.abort(gone)
        cache.check_integrity()
    finally:
        cache.close()


def test_the_guard_is_silent_about_a_head_that_is_not_on_the_last_page() -> None:
    """A match uses its first page, and not the node that the request resumes at."""
    head = paged_plugin("head", Reach(Leading(1)))
    config = CacheConfig(
        components={"full": {"n_layers": 1}, "head": {}},
        page_size=16,
        device_tokens=64 * 16,
        guard=GuardMode.ON,
    )
    with Cache(config, plugins=[head]) as cache:
        for computed in (100, 4):
            request = cache.begin(TokenKey(range(100)))
            assert cache.admit(request).admitted
            assert cache.allocate(request, computed)
            cache.computed(request, computed)
            cache.finish(request)


def test_a_cache_of_a_head_alone_is_refused() -> None:
    head = paged_plugin("head", Reach(Leading(1)))
    with pytest.raises(ConfigError, match=r"component .head.: its reach .* put it beside"):
        Cache(CacheConfig(components={"head": {}}, device_tokens=640), plugins=[head])


def test_at_a_chunks_end_nothing_of_a_local_chunk_is_missing() -> None:
    """The boundary lies inside a node whose data is gone, and needs none of it (M1)."""
    local = paged_plugin("local", Reach(ChunkedLocal(8)))
    config = CacheConfig(
        components={"full": {"n_layers": 1}, "local": {}},
        page_size=2,
        device_tokens=200,
        host_tokens=0,
        load=None,
    )
    cache = Cache(config, plugins=[local])
    try:
        request = cache.begin(TokenKey(range(22)))
        assert cache.admit(request).admitted
        assert cache.allocate(request, 22)
        cache.computed(request, 22)
        cache.finish(request)
        cache.evict("local", 100)
        found = cache.begin(TokenKey(range(23)))
        assert found.anchor_tokens == 16
        assert "accepts 16" in str(cache.explain(TokenKey(range(23))))
        cache.abort(found)
    finally:
        cache.close()


def short_once_it_slides(component: Component, query: LockQuery) -> list[Span]:
    """A pin of a window, a page short where pages lie before it."""
    width = -(-int(component.reach.width_tokens) // query.page_size)
    first = max(0, query.boundary - width)
    return [Span(first + bool(first), query.boundary)] if query.boundary else []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("given", [{}, {"window": 4096}])
def test_a_reach_that_is_long_by_default_ends_within_the_state_machines_sequences(
    given: dict[str, Any],
) -> None:
    """Also at its default length; a length that is given stays."""
    package = SimpleNamespace(
        declare_component=kvgraft_swa.plugin.declare_component,
        create_component=kvgraft_swa.plugin.create_component,
        acquire_component_lock=hookimpl(short_once_it_slides),
        release_component_lock=hookimpl(lambda component, segment: None),
    )
    bad = Subject(load_plugin("swa", package), given, PROFILES["dev"])
    assert bad.narrow == {"window": 5} | given
    assert (bad.drive(frozenset()).violation is None) == bool(given)
