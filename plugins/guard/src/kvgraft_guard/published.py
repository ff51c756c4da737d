"""Checks where data of a running request goes when it leaves it (I1, I7, I9, I10, I11).

A second opinion: pages and states that an operation takes from a request are searched in the tree,
page by page, and compared with the request's points.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.cache import Cache
from kvgraft.errors import ContractViolation
from kvgraft.requests.components import DECODED
from kvgraft.requests.request import Request
from kvgraft.tree.component import TreeComponent
from kvgraft.types import PointKind
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.paths import follow, needed

__all__ = ["SMALL_TOKENS", "Departed", "PublishedData", "SequenceSlots"]

Pages = npt.NDArray[np.int32]
"""Slots of consecutive pages from the first one on, `[n_pages, slots_per_page]`; -1 for none."""

SMALL_TOKENS = 64
"""Tokens left behind that a decode may collect, or give back instead."""

GRID_SHARE = 8
"""Bytes of the base component for each byte of a grid's points, at least (I12)."""

DEEP_PAGES = 1 << 20
"""A boundary behind every reach's width."""


DEEPEST_STAMP = 1 << 62
"""Before all evict-first data."""


class SequenceSlots(NamedTuple):
    """A request's own slots and the tree's slots of its sequence, at one moment.

    Attributes:
        own: by paged component, slots that are the request's.
        tree: the same of the tree.
        stamps: last uses of the tree's; negative for evict-first data, 0 for none.
        copied: which of the tree's have a copy on HOST.
        held: pages that are pinned in the tree, data or not.
        states: by state component, the request's captured ones by boundary.
        shared: the same of the tree.
        points: the request's resume points.
        marked: boundaries that the tree knows as resume points.
        due: the boundary at which its live states are to be captured; 0 if none.
        clock: the tree's.
        skipped: points skipped so far, of all requests.
        known: those of the request, which do not count again.
    """

    own: dict[int, Pages]
    tree: dict[int, Pages]
    stamps: dict[int, npt.NDArray[np.int64]]
    copied: dict[int, npt.NDArray[np.bool_]]
    held: dict[int, npt.NDArray[np.bool_]]
    states: dict[int, dict[int, bytes]]
    shared: dict[int, dict[int, bytes]]
    points: dict[int, PointKind]
    marked: frozenset[int]
    due: int
    clock: int
    skipped: int
    known: frozenset[tuple[int, PointKind]]


class Departed(NamedTuple):
    """Slots of one component that left a request in an operation.

    Attributes:
        adopted: slots that the tree has now.
        freed: the others.
    """

    adopted: int
    freed: int


class PublishedData:
    """Checks the data that the requests of one cache give to the tree.

    Attributes:
        cost: bytes of one resume point, and of its states alone.
        base: bytes of the base component on one page.
    """

    def __init__(self, cache: Cache, hooks: Sequence[HookGuard]) -> None:
        self.cache = cache
        self._hooks = {hook.name: hook for hook in hooks}
        self.tree = cache.tree
        self._paged = [component for component in cache.tree.components if not component.is_state]
        self._stateful = [component for component in cache.tree.components if component.is_state]
        self.matters = any(not component.is_prefix_closed for component in cache.tree.components)
        self.base = self._bytes(cache.tree.components[0]) * cache.tree.components[0].slots_per_page
        bounded = [component for component in self._paged if not component.is_prefix_closed]
        states = sum(self._bytes(component) for component in self._stateful)
        pages = sum(
            self._bytes(component)
            * component.slots_per_page
            * component.reach_pages.width(DEEP_PAGES)
            for component in bounded
        )
        self.cost = (pages + states, states)
        # The core decides by the pools' sizes as the cache is opened.
        base = self.tree.components[0]
        self._room = base.device.capacity / base.slots_per_page
        self._n_states = [component.device.capacity for component in self._stateful]
        self._newest = [-DEEPEST_STAMP] * len(cache.tree.components)

    def _bytes(self, tree_component: TreeComponent) -> int:
        """Bytes of a slot, on all tiers where it lies on both at once."""
        component = self.cache.mounted[tree_component.index].component
        nbytes = component.device.slot_nbytes
        if tree_component.home_is_host and component.host is not None:
            nbytes += component.host.slab_nbytes
        return nbytes

    def affords(self, n_pages: int, *, states_only: bool) -> bool:
        """Whether one more point, or one more state, is within its share of `n_pages` (I12).

        A point's share of the state slots is no larger than its share of the base's slots.
        """
        few = any(n_pages * n_states < GRID_SHARE * self._room for n_states in self._n_states)
        return n_pages * self.base >= GRID_SHARE * self.cost[states_only] and (
            states_only or not few
        )

    # -- before and after

    def see(self, request: Request) -> SequenceSlots:
        """Its own slots and the tree's of its sequence, now; O(pages)."""
        n_pages = request.allocated
        nodes, end = follow(self.tree, request.key, n_pages, request.root)
        own: dict[int, Pages] = {}
        tree: dict[int, Pages] = {}
        stamps: dict[int, npt.NDArray[np.int64]] = {}
        copied: dict[int, npt.NDArray[np.bool_]] = {}
        held: dict[int, npt.NDArray[np.bool_]] = {}
        for component in self._paged:
            size = component.slots_per_page
            mine, theirs = (np.full((n_pages, size), -1, np.int32) for _ in range(2))
            used, on_host = np.zeros(n_pages, np.int64), np.zeros(n_pages, np.bool_)
            pinned = np.zeros(n_pages, np.bool_)
            for node in nodes:
                cell = node.cells[component.index]
                part = slice(node.start, min(node.end, end))
                on_host[part] = cell.host is not None
                pinned[part] = cell.device_pins > 0
                if cell.device is not None:
                    slots = np.frombuffer(cell.device, np.int32).reshape(-1, size)
                    theirs[part] = slots[: part.stop - part.start]
                    used[part] = cell.stamp
            for run in request.components[component.index].runs:
                mine[run.first : run.end] = np.frombuffer(run.device, np.int32).reshape(-1, size)
            own[component.index], tree[component.index] = mine, theirs
            stamps[component.index], copied[component.index] = used, on_host
            held[component.index] = pinned
        states: dict[int, dict[int, bytes]] = {}
        shared: dict[int, dict[int, bytes]] = {}
        due = 0
        for component in self._stateful:
            slots_of = request.state_component(component.index)
            states[component.index] = dict(slots_of.captured) if slots_of is not None else {}
            if slots_of is not None and slots_of.due_as is not DECODED:
                due = max(due, slots_of.due)
            shared[component.index] = {
                node.end: cell.device
                for node in nodes
                if node.end <= end and (cell := node.cells[component.index]).device is not None
            }
        marked = frozenset(page for node in nodes for page, _ in node.each_point())
        skipped = sum(self.cache.points.skipped.values())
        return SequenceSlots(
            own,
            tree,
            stamps,
            copied,
            held,
            states,
            shared,
            dict(request.points),
            marked,
            due,
            self.tree.clock,
            skipped,
            request.skipped,
        )

    def check(
        self, request: Request, was: SequenceSlots, end: int | None, *, evicted: bool
    ) -> dict[int, Departed]:
        """Data that left the request is the tree's where it must be, with the right stamps.

        Args:
            request: whose; its points are those that it has now.
            was: its data before.
            end: the end of the shared pages; pages behind it are not checked. None for all.
            evicted: whether data was evicted on DEVICE meanwhile.
        """
        now = self.see(request)
        departed = {}
        for component in self._paged:
            departed[component.index] = self._check_pages(
                request, component, (was, now), end, evicted
            )
        if not evicted:
            self._check_states(request, was, now)
            self._check_new_points(request, was, now)
        self._check_grid(request)
        return departed

    # -- pages

    def _wanted_by(
        self, component: TreeComponent, boundaries: list[int], n_pages: int
    ) -> npt.NDArray[np.bool_]:
        """Pages that a component needs at any of `boundaries`."""
        pages = np.zeros(n_pages, np.bool_)
        for boundary in boundaries:
            for low, high in needed(component, boundary, self.tree.page_size):
                pages[low:high] = True
        return pages

    def _check_pages(
        self,
        request: Request,
        component: TreeComponent,
        moments: tuple[SequenceSlots, SequenceSlots],
        end: int | None,
        evicted: bool,  # noqa: FBT001 - passed on
    ) -> Departed:
        was, now = moments
        index = component.index
        before = was.own[index]
        n_pages = len(before)
        later = np.full_like(before, -1)
        later[: len(now.own[index])] = now.own[index][:n_pages]
        had = was.tree[index]
        has = np.full_like(before, -1)
        has[: len(now.tree[index])] = now.tree[index][:n_pages]
        gone = (before[:, 0] >= 0) & (later[:, 0] < 0)
        if end is not None:
            gone[end:] = False
        if not gone.any():
            return Departed(0, 0)
        adopted = gone & (has == before).all(axis=1)
        freed = gone & ~adopted
        size = component.slots_per_page
        if evicted:
            return Departed(int(adopted.sum()) * size, int(freed.sum()) * size)
        there = had[:, 0] >= 0
        other = freed & (has != had).any(axis=1)
        if other.any():
            page = int(other.argmax())
            raise ContractViolation(
                "I1",
                component.name,
                f"page {page} of {_of(request)} was in its slot {before[page, 0]}; the tree had "
                f"{had[page, 0]} and has {has[page, 0]}",
            )
        hangs = np.ones(n_pages, np.bool_)
        for each in component.depends_on:
            if self.tree.components[each].is_prefix_closed:
                continue  # the request has it on every page
            column = now.tree[each][:n_pages, 0]
            hangs[: len(column)] &= column >= 0
        # On a pinned page it would not be there for the next to take (A12).
        lost = freed & ~there & hangs & ~was.held[index]
        worth = left = np.ones(n_pages, np.bool_)
        if not component.is_prefix_closed:
            worth = self._wanted_by(component, sorted(request.points), n_pages)
            if self._stateful:
                left = self._wanted_by(component, sorted(request.left), n_pages)
        stamps = np.zeros(n_pages, np.int64)
        stamps[: len(now.stamps[index])] = now.stamps[index][:n_pages]
        behind = stamps < 0
        copied = np.zeros(n_pages, np.bool_)
        copied[: len(now.copied[index])] = now.copied[index][:n_pages]
        if not self._may_give_back(request, was, gone):
            self._raise_for(request, component, "I10", lost & worth, "needed at a point, is freed")
            self._raise_for(
                request, component, "I10", gone & worth & behind, "needed at a point, goes first"
            )
            self._raise_for(
                request,
                component,
                "T7",
                freed & there & worth & (stamps <= was.clock),
                "was computed once more, and does not count as used",
            )
            if not self._is_small(request):
                self._raise_for(
                    request, component, "I9", lost & left & ~worth, "is freed, not left behind"
                )
        self._raise_for(
            request, component, "I10", adopted & ~worth & ~left, "is kept where no state is"
        )
        self._raise_for(
            request,
            component,
            "I9",
            adopted & ~worth & ~behind & ~copied & ~self._asked_for(component, n_pages),
            "was left behind and does not go first",
        )
        early = adopted & behind & (stamps < self._newest[index])
        self._raise_for(request, component, "I9", early, "goes before data left behind earlier")
        if (adopted & behind).any():
            self._newest[index] = int(stamps[adopted & behind].max())
        return Departed(int(adopted.sum()) * size, int(freed.sum()) * size)

    def _asked_for(self, component: TreeComponent, n_pages: int) -> npt.NDArray[np.bool_]:
        """Pages that a component asked to pin by its own hook, which is a use."""
        asked = np.zeros(n_pages, np.bool_)
        hook = self._hooks.get(component.name)
        for low, high in hook.asked if hook is not None else ():
            asked[low:high] = True
        return asked

    def _is_small(self, request: Request) -> bool:
        return self.tree.page_size < SMALL_TOKENS and request.computed > request.prompt

    def _may_give_back(
        self, request: Request, was: SequenceSlots, gone: npt.NDArray[np.bool_]
    ) -> bool:
        """Whether the pages are no longer named or found, or others' cannot be pinned there."""
        last = int(np.flatnonzero(gone)[-1]) + 1
        named = request.key.n_tokens // self.tree.page_size
        if not request.has_same_key() or named < last or request.root in self.tree.cleared:
            return True
        for component in self.tree.prefix_closed:
            at_home = (was.own[component.index][:, 0] >= 0) & was.copied[component.index]
            if component.home_is_host and at_home.any():
                return True
            beside = self.beside(was, component) * component.slots_per_page
            if beside > max(0, component.devices[request.root.tenant].headroom):
                return True
        return False

    def beside(self, was: SequenceSlots, component: TreeComponent) -> int:
        """Pages that both the request and the tree had slots for."""
        own, tree = was.own[component.index], was.tree[component.index]
        return int(((own[:, 0] >= 0) & (tree[:, 0] >= 0)).sum())

    def _raise_for(
        self,
        request: Request,
        component: TreeComponent,
        rule: str,
        pages: npt.NDArray[np.bool_],
        what: str,
    ) -> None:
        if pages.any():
            raise ContractViolation(
                rule,
                component.name,
                f"page {int(pages.argmax())} of {_of(request)} {what}, and {int(pages.sum()) - 1} "
                f"others; its points are {sorted(request.points)}, states are left at "
                f"{sorted(request.left)}",
            )

    # -- points

    def _check_new_points(self, request: Request, was: SequenceSlots, now: SequenceSlots) -> None:
        """Pages before a point that was decided late have not been left behind before (I10)."""
        first = request.anchor_tokens // self.tree.page_size
        for page in now.points.keys() - was.points.keys() - request.left:
            for component in self._paged:
                behind = (now.stamps[component.index] < 0) & (now.own[component.index][:, 0] < 0)
                for low, high in needed(component, page, self.tree.page_size):
                    if page <= len(behind) and behind[max(low, first) : high].any():
                        at = max(low, first) + int(behind[max(low, first) : high].argmax())
                        raise ContractViolation(
                            "I10",
                            component.name,
                            f"page {at} of {_of(request)}, needed at its point {page}, was left "
                            "behind before and goes first",
                        )

    def _check_grid(self, request: Request) -> None:
        """A grid costs its share of the base's bytes at most (I12), and is there (I10)."""
        grid = [page for page, kind in request.points.items() if kind is PointKind.GRID]
        grid.sort()
        for one, other in pairwise(grid):
            if not self.affords(other - one, states_only=False):
                raise ContractViolation(
                    "I12",
                    None,
                    f"points of the grid of {_of(request)} at pages {one} and {other}: one takes "
                    f"{self.cost[0]} bytes, a page of the base {self.base}",
                )
        if self._stateful or not self.matters:
            return
        size = self.tree.page_size
        last = min(request.receipt.anchor.end, (request.prompt - 1) // size)
        at = request.anchor_tokens // size
        for page in [*sorted(page for page in request.points if at < page < last), last]:
            if (page - at) * self.base > 2 * (GRID_SHARE * self.cost[0] + self.base):
                raise ContractViolation(
                    "I10",
                    None,
                    f"{_of(request)} has no point between pages {at} and {page}; one takes "
                    f"{self.cost[0]} bytes, a page of the base {self.base}",
                )
            at = page

    # -- states

    def _check_states(self, request: Request, was: SequenceSlots, now: SequenceSlots) -> None:
        """States at a boundary are kept for all components or for none, and so are its pages."""
        kept: dict[int, set[int]] = {}
        for component in self._stateful:
            index = component.index
            # Others' states may arrive meanwhile, by a transfer.
            new = {
                page
                for page, slot in now.shared[index].items()
                if was.states[index].get(page) == slot
            }
            kept[index] = new | now.states[index].keys()
        decided = request.points.keys() | request.left
        for component in self._stateful:
            index = component.index
            strays = (kept[index] - was.states[index].keys()) - decided
            lacks = {
                page
                for page in (*was.states[index], was.due)
                if page in decided
                and page not in kept[index]
                and page not in now.shared[index]
                and not self._is_due(request, component, page)
                and self._hangs(component, now, page)
            }
            if strays or lacks:
                raise ContractViolation(
                    "I10",
                    component.name,
                    f"{_of(request)} keeps states at {sorted(strays)} that are no points, and none "
                    f"at {sorted(lacks)}; its points are {sorted(request.points)}, states are left "
                    f"at {sorted(request.left)}",
                )
        self._check_skipped(request, was, now, kept)

    def _hangs(self, component: TreeComponent, now: SequenceSlots, page: int) -> bool:
        """Whether the tree has the pages that a state at `page` needs to be of use (T4)."""
        return all(
            page <= len(now.tree[each]) and now.tree[each][page - 1, 0] >= 0
            for each in component.depends_on
        )

    def _is_due(self, request: Request, component: TreeComponent, page: int) -> bool:
        """Whether the state is still to be captured, or the live one."""
        own = request.state_component(component.index)
        return own is not None and own.due == page

    def _check_skipped(
        self, request: Request, was: SequenceSlots, now: SequenceSlots, kept: dict[int, set[int]]
    ) -> None:
        """A point that was given up changed nothing and was counted (I11)."""
        gone = was.points.keys() - request.points.keys()
        new = {(page, was.points[page]) for page in gone} - was.known
        if now.skipped - was.skipped < len(new):
            raise ContractViolation(
                "I11",
                None,
                f"{_of(request)} gave up points at {sorted(gone)}; skipped went from "
                f"{was.skipped} to {now.skipped}",
            )
        for page in gone:
            there = [
                component.name for component in self._stateful if page in kept[component.index]
            ]
            if there or page in now.marked - was.marked:
                raise ContractViolation(
                    "I11",
                    None,
                    f"{_of(request)} skipped the point at page {page} and left states of "
                    f"{len(there)} components there, {there}",
                )


def _of(request: Request) -> str:
    return f"the request of {request.prompt} tokens"
