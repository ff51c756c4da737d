"""Finds the boundaries that can be resumed from, by the tiers of their pages (S3, S4).

The pages to fetch are summed up, page by page and component by component; then a boundary is
checked in O(components), for any reach. Both are done a block of pages at a time.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.tree import matching
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

__all__ = [
    "ANY",
    "Bounds",
    "Inventory",
    "Mask",
    "Plan",
    "ShortOf",
    "backed_on_host",
    "lacking_pages",
    "take_inventory",
]

AT_A_TIME = 64
"""Boundaries that are checked one by one before other work has a turn."""

PAGES_AT_ONCE = 4096
"""Pages that are counted, or boundaries that are checked, before other work has a turn."""

Mask = npt.NDArray[np.bool_]


class ShortOf(enum.Enum):
    """The first limit that was too small; the reason names it first, with its size."""

    HOST = "HOST memory is short"
    BUDGET = "too much is in flight"


class Bounds(NamedTuple):
    """Limits of a plan.

    Attributes:
        n_slots: most HOST slots, per component; None for any number.
        nbytes: most bytes of HOST; None for any number.
        slot_nbytes: bytes of a slot, per component.
    """

    n_slots: Sequence[int] | None
    nbytes: int | None
    slot_nbytes: Sequence[int]


ANY = Bounds(None, None, ())


class Plan(NamedTuple):
    """The slots and fetches that a boundary needs.

    Attributes:
        boundary: in pages.
        pages: per component, bool `[boundary - start]`, the pages to fetch; a state's is the last
            before its boundary.
        n_slots: per component, the HOST slots for them.
    """

    boundary: int
    pages: list[Mask]
    n_slots: list[int]


class Inventory:
    """The pages of a sequence that must come from STORAGE, with their sums before each page.

    Args:
        tree: the tree.
        start: where a prefetch begins: a boundary backed on HOST, in pages.
        anchor: the deepest boundary all components accept now.
        limit: the deepest boundary of interest.

    Attributes:
        first: the first page of everything here.
        limit: the deepest reachable boundary of interest.
    """

    def __init__(self, tree: Tree, *, start: int, anchor: int, limit: int) -> None:
        self.tree = tree
        self.first = min(start, anchor)
        self.start = start
        self.anchor = anchor
        self.limit = limit
        n_pages = limit - self.first
        self._lacks = [np.empty(n_pages, dtype=np.bool_) for _ in tree.components]
        self._wanted = [_no_sums(n_pages) for _ in tree.components]
        self._missing = [_no_sums(n_pages) for _ in tree.components]

    def count(
        self, low: int, lacking: Sequence[Mask], found: Sequence[Mask], arrived: Sequence[Mask]
    ) -> None:
        """Count the pages from `low` on; those before it have been counted.

        Args:
            low: a page.
            lacking: per component, bool `[n]`, of these pages.
            found: per component, bool `[n_pages]` from `start` on, pages that STORAGE should have.
            arrived: likewise, pages that are on HOST already, not in the tree.
        """
        at, limit = low - self.first, self.limit
        for component, mask in zip(self.tree.components, lacking):
            index, end = component.index, at + len(mask)
            lacks = mask & ~self._between(arrived[index], low, low + len(mask))
            gone = lacks & ~self._between(found[index], low, low + len(mask))
            self._lacks[index][at:end] = lacks
            _sum_up(self._wanted[index], at, lacks)
            _sum_up(self._missing[index], at, gone)
            if component.is_prefix_closed and (behind := gone[max(0, self.start - low) :]).any():
                limit = min(limit, low + len(gone) - len(behind) + int(behind.argmax()))
        self.limit = limit

    def deepest(self, bounds: Bounds, least: int) -> Generator[None, None, Plan | None]:
        """Find the deepest boundary that every component could resume from (S3).

        Many boundaries are checked at once, except for components whose reach is neither
        everything, a window nor a state: for those one boundary after the other.

        Args:
            bounds: the slots it may take.
            least: the shallowest boundary to consider, in pages.

        Yields:
            Now and then, so that other work has a turn; the tree may change meanwhile.

        Returns:
            The slots the boundary takes; None if there is none.
        """
        least = max(least, self.anchor + 1)
        for end in range(self.limit + 1, least, -PAGES_AT_ONCE):
            if end <= self.limit:
                yield
            low = max(least, end - PAGES_AT_ONCE)
            fits = np.ones(end - low, dtype=np.bool_)
            nbytes = np.zeros(end - low, dtype=np.int64)
            others = []
            for component in self.tree.components:
                missing = self._counts(component, self._missing[component.index], low, end)
                wanted = self._counts(component, self._wanted[component.index], low, end)
                if missing is None or wanted is None:
                    others.append(component)
                    continue
                fits &= missing == 0
                n_slots = wanted * _per_page(component)
                if bounds.n_slots is not None:
                    fits &= n_slots <= bounds.n_slots[component.index]
                if bounds.nbytes is not None:
                    nbytes += n_slots * bounds.slot_nbytes[component.index]
            if bounds.nbytes is not None:
                fits &= nbytes <= bounds.nbytes
            for number, at in enumerate(np.flatnonzero(fits)[::-1]):
                if number and not number % AT_A_TIME:
                    yield
                boundary = low + int(at)
                if self._accepts(boundary, others, bounds, int(nbytes[at])):
                    return self._plan(boundary)
        return None

    def _accepts(
        self, boundary: int, components: Sequence[TreeComponent], bounds: Bounds, nbytes: int
    ) -> bool:
        for component in components:
            spans = self._spans(component, boundary)
            if _count(self._missing[component.index], spans):
                return False
            n_slots = _count(self._wanted[component.index], spans) * _per_page(component)
            if bounds.n_slots is not None and n_slots > bounds.n_slots[component.index]:
                return False
            if bounds.nbytes is not None:
                nbytes += n_slots * bounds.slot_nbytes[component.index]
                if nbytes > bounds.nbytes:
                    return False
        return True

    def _plan(self, boundary: int) -> Plan:
        pages, n_slots = [], []
        before = self.start - self.first
        for component in self.tree.components:
            mask = np.zeros(boundary - self.start, dtype=np.bool_)
            for span in self._spans(component, boundary):
                low, high = max(span.start, before), max(span.end, before)
                mask[low - before : high - before] = self._lacks[component.index][low:high]
            pages.append(mask)
            n_slots.append(int(np.count_nonzero(mask)) * _per_page(component))
        return Plan(boundary, pages, n_slots)

    def _between(self, mask: Mask, low: int, high: int) -> Mask:
        """Of a mask from `start` on, the pages `[low, high)`; none is set before `start`."""
        part = mask[max(0, low - self.start) : max(0, high - self.start)]
        if len(part) == high - low:
            return part
        return np.concatenate([np.zeros(high - low - len(part), dtype=np.bool_), part])

    def _counts(
        self, component: TreeComponent, sums: npt.NDArray[np.int32], low: int, end: int
    ) -> npt.NDArray[np.int32] | None:
        """The number of some pages needed at each boundary `[low, end)`, as `_spans` says.

        None for a reach that must be asked about each.
        """
        low, end = low - self.first, end - self.first
        if component.is_state:
            return np.asarray(sums[low:end] - sums[low - 1 : end - 1])
        if component.is_prefix_closed:
            return np.asarray(np.maximum(sums[low:end] - sums[self.start - self.first], 0))
        if component.window_pages is None:
            return None
        starts = np.maximum(np.arange(low, end) - component.window_pages, 0)
        return np.asarray(sums[low:end] - sums[starts])

    def _spans(self, component: TreeComponent, boundary: int) -> list[Span]:
        """Pages a component needs at a boundary, counted from `first`."""
        if component.is_state:
            return [Span(boundary - 1 - self.first, boundary - self.first)]
        # Data that reaches need behind the anchor is there: reaches only look back (see
        # `matching`).
        begin = self.start if component.is_prefix_closed else self.first
        return [
            Span(max(span.start, begin) - self.first, span.end - self.first)
            for span in component.reach_pages.spans(boundary)
            if span.end > begin
        ]


def _per_page(component: TreeComponent) -> int:
    return 1 if component.is_state else component.slots_per_page


def _no_sums(n_pages: int) -> npt.NDArray[np.int32]:
    """Room for how many are set before each position, `[n_pages + 1]`."""
    sums = np.empty(n_pages + 1, dtype=np.int32)
    sums[0] = 0
    return sums


def _sum_up(sums: npt.NDArray[np.int32], at: int, mask: Mask) -> None:
    """Go on with sums that are known up to position `at`."""
    part = sums[at + 1 : at + 1 + len(mask)]
    np.cumsum(mask, out=part)
    part += sums[at]


def _count(sums: npt.NDArray[np.int32], spans: Sequence[Span]) -> int:
    return sum(int(sums[span.end] - sums[span.start]) for span in spans)


def backed_on_host(tree: Tree, node: Node) -> bool:
    """Whether HOST data may be below a node: a root, or one whose base is on HOST (S1)."""
    if node.parent is None:
        return True
    return all(
        node.cells[component.index].host is not None
        for component in tree.prefix_closed or tree.components[:1]
    )


def take_inventory(
    tree: Tree,
    key: TokenKey,
    found: Sequence[Mask],
    arrived: Sequence[Mask],
    *,
    start: int,
    limit: int,
) -> Generator[None, None, Inventory]:
    """The pages that must come from STORAGE, up to page `limit`; see `Inventory.count`.

    Yields:
        After each `PAGES_AT_ONCE` pages, so that other work has a turn; the tree may change
        meanwhile.
    """
    anchor = matching.match(tree, key, limit).anchor
    inventory = Inventory(tree, start=start, anchor=anchor, limit=limit)
    for low in range(inventory.first, limit, PAGES_AT_ONCE):
        if low >= inventory.limit:
            break
        if low > inventory.first:
            yield
        lacking = lacking_pages(tree, key, start, low, min(low + PAGES_AT_ONCE, limit))
        inventory.count(low, lacking, found, arrived)
    return inventory


def lacking_pages(tree: Tree, key: TokenKey, start: int, low: int, high: int) -> list[Mask]:
    """The pages of `[low, high)` of a sequence that a tree lacks, on HOST or at all.

    HOST must be complete, from `start` on, for components that need every page and for the base,
    whose data may not be below a gap (B1, T4). For others DEVICE suffices.

    Returns:
        Per component, bool `[high - low]`. A state counts for the last page before its boundary.
    """
    lacking = [np.ones(high - low, dtype=np.bool_) for _ in tree.components]
    path = matching.follow_key(tree, key, high)
    _remember(tree, key, path)
    for node in reversed(path.nodes):
        if node.end <= low:
            break
        begin, end = max(node.start, low), min(node.end, path.end)
        for component, mask in zip(tree.components, lacking):
            cell = node.cells[component.index]
            closed = tree.prefix_closed_host and (
                component.is_prefix_closed or component is tree.components[0]
            )
            there = matching.readable(cell, component, device_only=False)
            if closed and node.start >= start:
                there = cell.host is not None
            if component.is_state:
                if there and node.end == end:
                    mask[end - 1 - low] = False
            elif there:
                mask[begin - low : end - low] = False
    return lacking


def _remember(tree: Tree, key: TokenKey, path: matching.Path) -> None:
    """Leave a trail for the next look, which need not compare the same tokens again."""
    trail = key.trail
    for node in reversed(path.nodes[-2:]):
        if node.end <= path.end:
            if trail is None or trail.parent is None or trail.end < node.end:
                key.found_at(node, tree.root(key.namespace))
            return
