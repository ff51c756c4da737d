"""Where requests can be resumed from, by definition (I9 to I12).

A boundary can be resumed from if every component has the data it needs there. Some boundaries are
resume points: their data is worth keeping. Evict-first data of bounded reaches is kept too, until
its memory is needed. No tree, no slots: only sets of page numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kvgraft_testing.machine.brute_force import BruteForce, ModelComponent

__all__ = ["DRAFTED_TOKENS", "SHARE", "Progress", "Published", "Resuming"]

SHARE = 8
"""A grid of points takes at most one byte for this many of the base component's."""

REPEAT_SHARE = 4
"""A state before an aligned prompt's last page saves a repeat at least one page in this many."""

SMALL_STEP = 64
"""With smaller pages, the pages behind a decode's reaches go back to the pools."""

DRAFTED_TOKENS = 64
"""Tokens between two states of a decode with drafts, at most, where there are windows."""

COMPARED_PAGES = 96
"""Boundaries, in pages, at which a component's need is counted for the grid."""


NOTHING: Mapping[str, set[int]] = {}


@dataclass
class Progress:
    """One request's own data and the data it left, in pages and boundaries.

    Attributes:
        points: its resume points so far.
        left: boundaries whose states it left behind.
        last_point, last_left: the deepest of either it passed.
        private: per component, pages it owns.
        captured: boundaries of states it owns.
        shared: the deepest boundary whose state the tree was given; 0 for none.
        based: how far components that need every page have theirs in the tree, pinned.
        dropped: pages of some component that it freed.
    """

    points: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    last_point: int = 0
    last_left: int = 0
    private: dict[str, set[int]] = field(default_factory=dict)
    captured: set[int] = field(default_factory=set)
    shared: int = 0
    based: int = 0
    dropped: set[int] = field(default_factory=set)


@dataclass
class Published:
    """Data that leaves a request.

    Attributes:
        end: boundary up to which the tree is offered something.
        pages: per paged component, the pages offered.
        states: boundaries whose states are offered.
        left: per component, those of both that are left behind: no resume point needs them.
    """

    end: int
    pages: dict[str, set[int]]
    states: set[int]
    left: dict[str, set[int]]


@dataclass
class Resuming:
    """The data that requests of one cache leave to the tree, and its places.

    Attributes:
        model: the components.
        cut_pages: pages between two boundaries at which a prefill is cut for its states, at least.
        decode_pages: while decoding, states are kept at multiples of this many pages.
        spacing: pages between points of the grid.
        state_spacing: pages between states that are left behind.
    """

    model: BruteForce
    cut_pages: int = 0
    decode_pages: int = 1
    spacing: int = 1
    state_spacing: int = 1

    def __post_init__(self) -> None:
        parts = self.model.components
        self.states = [each for each in parts if each.is_state]
        self.bounded = [each for each in parts if not each.is_state and not each.is_prefix_closed]
        self.prefix_closed = [each for each in parts if each.is_prefix_closed]
        self.matters = bool(self.states or self.bounded)

    # -- which boundaries are resume points

    def ahead(self, prompt: int, anchor: int, known: int, asked: Collection[int]) -> set[int]:
        """The points decided when a prompt of that many tokens resumes at `anchor`.

        They are its end, the last boundary that an identical prompt can use, where it departs from
        others' data (`known`), and the named ones. With states, only boundaries where the prefill
        stops. A state that only repeats can use must save them a quarter, or be named.
        """
        if not self.matters:
            return set()
        last, repeat = prompt // self.model.page_size, (prompt - 1) // self.model.page_size
        points = {each for each in {last, repeat, known, *asked} if anchor < each <= last}
        kept: set[int] = set()
        before = anchor
        for page in sorted(points):
            ends_prompt = page * self.model.page_size == prompt
            repeats_alone = page == repeat != last and known < repeat and page not in asked
            rare = bool(self.states) and repeats_alone
            free = ends_prompt or not self.states or page in asked
            least = max(0 if free else self.cut_pages, repeat / REPEAT_SHARE if rare else 0)
            if page - before >= least:
                kept.add(page)
                before = page
        return kept

    def on_grid(self, prompt: int, start: int, end: int) -> set[int]:
        """Boundaries in `(start, end]` at which the regular points of a prompt lie."""
        last = min(end, (prompt - 1) // self.model.page_size)
        return {page for page in range(start + 1, last + 1) if page % self.spacing == 0}

    def is_on_grid(self, own: Progress, page: int) -> bool:
        """Whether a chunk that ends at a boundary leaves a regular point there."""
        return page - own.last_point >= self.spacing

    def most_nbytes(self, parts: Iterable[ModelComponent], nbytes: Mapping[str, int]) -> int:
        """Most bytes that a point of some components takes."""
        return sum(
            max(len(self.model.pages(each, page)) for page in range(1, COMPARED_PAGES))
            * (1 if each.is_state else each.slots_per_page)
            * nbytes[each.name]
            for each in parts
        )

    # -- data that a request leaves

    def reached_from(self, prompt: int, computed: int) -> int:
        """The boundary whose reaches a request keeps: windows wait for the next state (I10)."""
        size = self.model.page_size
        page = computed // size
        if computed <= prompt or not self.states or not self.bounded:
            return page
        return max(page - page % self.decode_pages, prompt // size)

    def behind(self, own: Progress, position: int) -> dict[str, set[int]]:
        """Per bounded component, a request's pages that it no longer needs at page `position`."""
        return {
            each.name: {
                page
                for page in own.private[each.name]
                if page < position and page not in self.model.pages(each, position)
            }
            for each in self.bounded
        }

    def is_needed(self, component: ModelComponent, boundaries: Iterable[int], page: int) -> bool:
        """Whether a component needs a page at any of some boundaries."""
        return any(page in self.model.pages(component, boundary) for boundary in boundaries)

    def may_drop(self, own: Progress, prompt: int, computed: int, name: str, page: int) -> bool:
        """Whether a page behind the reaches may be freed: no point needs it, and it decodes.

        With states, a page that neither a point nor an evict-first state needs is useless; the last
        state that a decode keeps needs its own.
        """
        each, reached = self.model.component(name), self.reached_from(prompt, computed)
        if self.is_needed(each, {*own.points, *own.left, reached}, page):
            return False
        small = self.model.page_size < SMALL_STEP and computed > prompt
        return small or bool(self.states)

    def goes_on(self, own: Progress, prompt: int, position: int) -> set[int]:
        """Points of the grid that a request meets as it publishes at page `position`."""
        return self.on_grid(prompt, own.last_point, position) if not self.states else set()

    def leave(
        self, own: Progress, prompt: int, end: int, kept: Mapping[str, set[int]] = NOTHING
    ) -> Published:
        """The offer, up to boundary `end`, of a request that ends or shares all its data.

        Except the pages `kept`, per component: others' data is in the tree there.
        """
        if self.matters and not self.states:
            own.points |= self.on_grid(prompt, own.last_point, end)
            own.last_point = max(own.last_point, end)
        pages = {
            each.name: {
                page for page in own.private[each.name] - kept.get(each.name, set()) if page < end
            }
            for each in (*self.prefix_closed, *self.bounded)
        }
        published = self.published(own, pages, {page for page in own.captured if page <= end}, end)
        own.based = max(own.based, end)
        return published

    def published(
        self, own: Progress, pages: dict[str, set[int]], states: set[int], end: int
    ) -> Published:
        """Pages and states that leave a request: for resume points, evict-first, or useless."""
        published = Published(end, {}, states, {})
        for each in (*self.prefix_closed, *self.bounded):
            went = pages[each.name]
            own.private[each.name] -= went
            left: set[int] = set()
            if not each.is_prefix_closed:
                left = {page for page in went if not self.is_needed(each, own.points, page)}
            if self.states:
                useless = {page for page in left if not self.is_needed(each, own.left, page)}
                went, left = went - useless, left - useless
            published.pages[each.name] = went
            published.left[each.name] = left
        own.captured -= states
        own.shared = max((own.shared, *states))
        for state in self.states:
            published.left[state.name] = states & own.left
        if not self.prefix_closed:
            self._drop_without_base(own, published)
        return published

    def _drop_without_base(self, own: Progress, published: Published) -> None:
        """Drop data whose bounded base is still the request's: it is of no use there (T4)."""
        base = self.model.components[0]
        for each in self.bounded:
            if base in self.model.depends_on(each):
                own.dropped |= published.pages[each.name] & own.private[base.name]
