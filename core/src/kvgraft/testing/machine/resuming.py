"""Where requests can be resumed from, by definition (I9 to I12).

A boundary can be resumed from if every component has there what it needs. Some boundaries are
resume points: what they need is worth keeping. Whatever else bounded reaches leave behind is kept
too, until its memory is needed. No tree, no slots: sets of page numbers and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvgraft.testing.machine.brute_force import BruteForce, ModelComponent

__all__ = ["SHARE", "Leaving", "Progress", "Resuming"]

SHARE = 8
"""A grid of points takes at most one byte for this many of the base component's."""

SMALL_STEP = 64
"""With pages of fewer tokens, the pages that decoding leaves behind go back to the pools."""

COMPARED_PAGES = 96
"""Boundaries, in pages, at which a component's need is counted for the grid."""


@dataclass
class Progress:
    """What one request has and left, in pages and boundaries.

    Attributes:
        points: its resume points so far.
        left: boundaries whose states it left behind.
        last_point, last_left: the deepest of either it passed.
        private: per component, pages it owns.
        captured: boundaries of states it owns.
        shared: the deepest boundary whose state the tree was given; 0 for none.
        based: how far components that need every page have theirs in the tree, pinned.
        dropped: pages of some component that it gave back.
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
class Leaving:
    """What leaves a request.

    Attributes:
        end: boundary up to which the tree is offered something.
        pages: per paged component, the pages offered.
        states: boundaries whose states are offered.
        left: per component, what of both is left behind: no resume point needs it.
    """

    end: int
    pages: dict[str, set[int]]
    states: set[int]
    left: dict[str, set[int]]


@dataclass
class Resuming:
    """What requests of one cache leave to the tree, and where.

    Attributes:
        model: the components.
        cut_pages: pages between two boundaries at which a prefill is cut for its states, at least.
        inside: whether the engine hands over states from inside a chunk.
        spacing: pages between points of the grid.
        state_spacing: pages between states that are left behind.
    """

    model: BruteForce
    cut_pages: int = 0
    inside: bool = False
    spacing: int = 1
    state_spacing: int = 1

    def __post_init__(self) -> None:
        parts = self.model.components
        self.states = [each for each in parts if each.is_state]
        self.bounded = [each for each in parts if not each.is_state and not each.is_everything]
        self.everything = [each for each in parts if each.is_everything]
        self.matters = bool(self.states or self.bounded)

    # -- which boundaries are resume points

    def ahead(self, prompt: int, anchor: int, known: int, asked: Iterable[int]) -> set[int]:
        """The points decided when a prompt of that many tokens resumes at `anchor`.

        Its end, the last boundary an identical prompt can use, where it leaves what others have
        computed (`known`), and what is asked for. With states only where the prefill stops, or
        states come from inside it.
        """
        if not self.matters:
            return set()
        last, repeat = prompt // self.model.page_size, (prompt - 1) // self.model.page_size
        points = {each for each in {last, repeat, known, *asked} if anchor < each <= last}
        if not self.states:
            return points
        kept: set[int] = set()
        before = anchor
        for page in sorted(points):
            ends_prompt = page * self.model.page_size == prompt
            if self.inside or ends_prompt or page - before >= self.cut_pages:
                kept.add(page)
                before = page
        return kept

    def on_grid(self, prompt: int, start: int, end: int) -> set[int]:
        """Boundaries in `(start, end]` at which the regular points of a prompt lie."""
        last = min(end, (prompt - 1) // self.model.page_size)
        return {page for page in range(start + 1, last + 1) if page % self.spacing == 0}

    def most_nbytes(self, parts: Iterable[ModelComponent], nbytes: Mapping[str, int]) -> int:
        """Most bytes that a point of some components takes."""
        return sum(
            max(len(self.model.pages(each, page)) for page in range(1, COMPARED_PAGES))
            * (1 if each.is_state else each.slots_per_page)
            * nbytes[each.name]
            for each in parts
        )

    # -- what a request leaves

    def behind(self, own: Progress, position: int) -> dict[str, set[int]]:
        """Per bounded component, a request's pages that it needs no more at page `position`."""
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

    def gives_back(self, own: Progress, prompt: int, computed: int) -> bool:
        """Whether what a step left behind goes back to the pools: decoding, in small pages.

        Not where pages before the prompt's last boundary are among it, which points may need.
        """
        last = prompt // self.model.page_size
        small = self.model.page_size < SMALL_STEP and computed > prompt
        return small and all(page >= last for pages in own.private.values() for page in pages)

    def leave(self, own: Progress, prompt: int, end: int, position: int | None) -> Leaving:
        """What a request offers to the tree up to boundary `end`; it owns that no more.

        It goes on at page `position`: what bounded reaches cover there it keeps. None if it ends,
        or shares that too. With states, what neither a point nor a state left behind needs is of
        no use, and given back.
        """
        if self.matters and not self.states:
            reached = end if position is None else position
            own.points |= self.on_grid(prompt, own.last_point, reached)
            own.last_point = max(own.last_point, reached)
        leaving = Leaving(end, {}, set(), {})
        for each in (*self.everything, *self.bounded):
            pages = {page for page in own.private[each.name] if page < end}
            if position is not None and not each.is_everything:
                pages -= self.model.pages(each, position)
            own.private[each.name] -= pages
            left: set[int] = set()
            if not each.is_everything:
                left = {page for page in pages if not self.is_needed(each, own.points, page)}
            if self.states:
                pages -= {page for page in left if not self.is_needed(each, own.left, page)}
            leaving.pages[each.name] = pages
            leaving.left[each.name] = left & pages
        last = end
        if not self.everything:
            last = self._without_base(own, leaving)
        leaving.states = {page for page in own.captured if page <= last}
        own.captured -= leaving.states
        own.shared = max(own.shared, *leaving.states) if leaving.states else own.shared
        for state in self.states:
            leaving.left[state.name] = leaving.states & own.left
        own.based = max(own.based, end)
        return leaving

    def _without_base(self, own: Progress, leaving: Leaving) -> int:
        """How deep states may be offered where the base is bounded and still the request's own.

        What else hangs from the base is of no use where that is missing, and given back (T4).
        """
        base = self.model.components[0]
        kept = own.private[base.name]
        for each in self.bounded:
            if base in self.model.hangs_from(each):
                own.dropped |= leaving.pages[each.name] & kept
        return min((leaving.end, *kept))
