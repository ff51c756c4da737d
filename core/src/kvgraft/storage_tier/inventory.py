"""Which boundaries could be resumed from, given what is where (S3, S4).

The walk over the tree is done once, into an array of pages per component; after that a boundary
is looked at in O(components), whatever its reach.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.tree import matching
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

__all__ = ["Inventory", "Plan", "ShortOf", "backed_on_host", "take_inventory"]

Mask = npt.NDArray[np.bool_]


class ShortOf(enum.Enum):
    """What there was too little of to begin with; the reason says so first, and how much."""

    HOST = "HOST memory is short"
    BUDGET = "too much is in flight"


class Plan(NamedTuple):
    """What a boundary takes.

    Attributes:
        boundary: in pages.
        pages: per component, the pages to fetch; a state's is the last before its boundary.
        n_slots: per component, the HOST slots for them.
    """

    boundary: int
    pages: list[list[int]]
    n_slots: list[int]


class Inventory(NamedTuple):
    """What a tree lacks of a sequence, behind the boundary it can be resumed from.

    Attributes:
        tree: the tree.
        first: the page that masks begin with.
        start: where a prefetch begins: a boundary backed on HOST, in pages.
        anchor: the deepest boundary all components accept now.
        limit: the deepest boundary of interest.
        lacking: per component, bool `[limit - first]`: whether a page must come from STORAGE. A
            state counts for the last page before its boundary.
    """

    tree: Tree
    first: int
    start: int
    anchor: int
    limit: int
    lacking: list[Mask]

    def deepest(
        self,
        found: Sequence[Collection[int]],
        arrived: Sequence[Collection[int]],
        fits: Callable[[Sequence[int]], bool],
        least: int,
    ) -> Plan | None:
        """The deepest boundary every component could resume from, and what it takes (S3).

        Args:
            found: per component, pages that STORAGE should have.
            arrived: per component, pages that are on HOST already, not in the tree.
            fits: whether so many slots per component can be had.
            least: the shallowest boundary worth it, in pages.
        """
        missing: list[npt.NDArray[np.int64]] = []
        wanted: list[npt.NDArray[np.int64]] = []
        fetch: list[Mask] = []
        candidates = np.ones(self.limit - self.first, dtype=np.bool_)
        for track in self.tree.tracks:
            lacks = self.lacking[track.index] & ~self._mask(arrived[track.index])
            gone = lacks & ~self._mask(found[track.index])
            missing.append(_sums(gone))
            wanted.append(_sums(lacks))
            fetch.append(lacks)
            if track.is_state:
                candidates &= ~gone
            elif track.is_everything:
                begin = self.start - self.first
                candidates[begin:] &= missing[-1][begin + 1 :] == missing[-1][begin]
        boundaries = np.flatnonzero(candidates) + self.first + 1
        for boundary in reversed(boundaries[boundaries >= max(least, self.anchor + 1)].tolist()):
            spans = [self._spans(track, boundary) for track in self.tree.tracks]
            if any(_count(sums, mine) for sums, mine in zip(missing, spans)):
                continue
            n_slots = [
                _count(sums, mine) * (1 if track.is_state else track.slots_per_page)
                for track, sums, mine in zip(self.tree.tracks, wanted, spans)
            ]
            if fits(n_slots):
                pages = [self._pages(mask, mine) for mask, mine in zip(fetch, spans)]
                return Plan(boundary, pages, n_slots)
        return None

    def _mask(self, pages: Collection[int]) -> Mask:
        mask = np.zeros(self.limit - self.first, dtype=np.bool_)
        inside = [page - self.first for page in pages if self.first <= page < self.limit]
        mask[inside] = True
        return mask

    def _spans(self, track: Track, boundary: int) -> list[Span]:
        """Pages a component needs at a boundary, counted from `first`."""
        if track.is_state:
            return [Span(boundary - 1 - self.first, boundary - self.first)]
        # What reaches back behind the anchor is there: reaches only look back (see `matching`).
        begin = self.start if track.is_everything else self.first
        return [
            Span(max(span.start, begin) - self.first, span.end - self.first)
            for span in track.reach_pages.spans(boundary)
            if span.end > begin
        ]

    def _pages(self, mask: Mask, spans: Sequence[Span]) -> list[int]:
        return [
            page + self.first
            for span in spans
            for page in (np.flatnonzero(mask[span.start : span.end]) + span.start).tolist()
        ]


def _sums(mask: Mask) -> npt.NDArray[np.int64]:
    """How many are set before each position, `[n + 1]`."""
    return np.concatenate([[0], np.cumsum(mask)])


def _count(sums: npt.NDArray[np.int64], spans: Sequence[Span]) -> int:
    return sum(int(sums[span.end] - sums[span.start]) for span in spans)


def backed_on_host(tree: Tree, node: Node) -> bool:
    """Whether HOST data may hang below a node: a root, or one whose base is on HOST (S1)."""
    if node.parent is None:
        return True
    return all(
        node.cells[track.index].host is not None for track in tree.everything or tree.tracks[:1]
    )


def take_inventory(tree: Tree, key: TokenKey, *, start: int, anchor: int, limit: int) -> Inventory:
    """What the tree lacks of a sequence up to page `limit`, on HOST or at all.

    HOST must be complete where data may not hang below a gap: for components that need every page,
    and for the base, from `start` on (B1, T4). Elsewhere DEVICE will do.
    """
    first = min(start, anchor)
    lacking = [np.ones(limit - first, dtype=np.bool_) for _ in tree.tracks]
    path = matching.follow(tree, tree.root(key.namespace), key.data, limit)
    for node in path.nodes:
        low, high = max(node.start, first), min(node.end, path.end)
        if low >= high:
            continue
        for track, mask in zip(tree.tracks, lacking):
            cell = node.cells[track.index]
            closed = tree.prefix_closed_host and (track.is_everything or track is tree.tracks[0])
            there = matching.readable(cell, track, device_only=False)
            if closed and node.start >= start:
                there = cell.host is not None
            if track.is_state:
                if there and node.end == high:
                    mask[high - 1 - first] = False
            elif there:
                mask[low - first : high - first] = False
    return Inventory(tree, first, start, anchor, limit, lacking)
