"""Which boundaries could be resumed from, given what is where (S3, S4).

The walk over the tree is done once, into an array of pages per component; after that a boundary
is looked at in O(components), whatever its reach.
"""

from __future__ import annotations

import enum
from collections.abc import Generator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.tree import matching
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.track import Track
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
    "take_inventory",
]

AT_A_TIME = 64
"""Boundaries that are looked at one by one before anybody else has a turn."""

Mask = npt.NDArray[np.bool_]


class ShortOf(enum.Enum):
    """What there was too little of to begin with; the reason says so first, and how much."""

    HOST = "HOST memory is short"
    BUDGET = "too much is in flight"


class Bounds(NamedTuple):
    """What a plan may take.

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
    """What a boundary takes.

    Attributes:
        boundary: in pages.
        pages: per component, the pages to fetch, int `[n]`, in order; a state's is the last before
            its boundary.
        n_slots: per component, the HOST slots for them.
    """

    boundary: int
    pages: list[npt.NDArray[np.int64]]
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

    def search(
        self, found: Sequence[Mask], arrived: Sequence[Mask], bounds: Bounds, least: int
    ) -> Generator[None, None, Plan | None]:
        """Look for the deepest boundary every component could resume from (S3).

        All boundaries are looked at at once, but for components whose reach is of another form
        than everything, a window or a state: those are asked about one boundary after the other.

        Args:
            found: per component, bool `[limit - start]`, pages that STORAGE should have.
            arrived: per component, likewise, pages that are on HOST already, not in the tree.
            bounds: what it may take.
            least: the shallowest boundary worth it, in pages.

        Yields:
            Now and then, so that others have a turn; the tree may change meanwhile.

        Returns:
            What the boundary takes; None if there is none.
        """
        lacks, gone = self._masks(found, arrived)
        n = self.limit - self.first
        low = max(least, self.anchor + 1) - self.first
        if low > n:
            return None
        fits = np.ones(n + 1 - low, dtype=np.bool_)
        nbytes = np.zeros(n + 1 - low, dtype=np.int64)
        others = []
        for track in self.tree.tracks:
            index = track.index
            missing = self._counts(track, gone[index], low)
            wanted = self._counts(track, lacks[index], low)
            if missing is None or wanted is None:
                others.append(track)
                continue
            fits &= missing == 0
            n_slots = wanted * _per_page(track)
            if bounds.n_slots is not None:
                fits &= n_slots <= bounds.n_slots[index]
            if bounds.nbytes is not None:
                nbytes += n_slots * bounds.slot_nbytes[index]
        if bounds.nbytes is not None:
            fits &= nbytes <= bounds.nbytes
        boundaries = np.flatnonzero(fits) + low + self.first
        if not others:
            return self._plan(int(boundaries[-1]), lacks) if len(boundaries) else None
        sums = [(track, _sums(gone[track.index]), _sums(lacks[track.index])) for track in others]
        for number in range(len(boundaries) - 1, -1, -1):
            boundary = int(boundaries[number])
            if self._accepts(boundary, sums, bounds, int(nbytes[boundary - low - self.first])):
                return self._plan(boundary, lacks)
            if not number % AT_A_TIME:
                yield
        return None

    def at(self, found: Sequence[Mask], arrived: Sequence[Mask], boundary: int) -> Plan | None:
        """What a boundary takes; None if not every component could resume from it."""
        if not self.anchor < boundary <= self.limit:
            return None
        lacks, gone = self._masks(found, arrived)
        if any(
            gone[track.index][span.start : span.end].any()
            for track in self.tree.tracks
            for span in self._spans(track, boundary)
        ):
            return None
        return self._plan(boundary, lacks)

    def _accepts(
        self,
        boundary: int,
        sums: Sequence[tuple[Track, npt.NDArray[np.int32], npt.NDArray[np.int32]]],
        bounds: Bounds,
        nbytes: int,
    ) -> bool:
        for track, missing, wanted in sums:
            spans = self._spans(track, boundary)
            if _count(missing, spans):
                return False
            n_slots = _count(wanted, spans) * _per_page(track)
            if bounds.n_slots is not None and n_slots > bounds.n_slots[track.index]:
                return False
            if bounds.nbytes is not None:
                nbytes += n_slots * bounds.slot_nbytes[track.index]
                if nbytes > bounds.nbytes:
                    return False
        return True

    def _plan(self, boundary: int, lacks: Sequence[Mask]) -> Plan:
        pages = [
            np.concatenate(
                [
                    np.zeros(0, dtype=np.int64),
                    *(
                        np.flatnonzero(lacks[track.index][span.start : span.end])
                        + (span.start + self.first)
                        for span in self._spans(track, boundary)
                    ),
                ]
            )
            for track in self.tree.tracks
        ]
        n_slots = [len(mine) * _per_page(track) for mine, track in zip(pages, self.tree.tracks)]
        return Plan(boundary, pages, n_slots)

    def _masks(
        self, found: Sequence[Mask], arrived: Sequence[Mask]
    ) -> tuple[list[Mask], list[Mask]]:
        """Per component, pages that must be fetched, and of those what cannot be had."""
        lacks = [mask & ~self._padded(there) for mask, there in zip(self.lacking, arrived)]
        return lacks, [mask & ~self._padded(there) for mask, there in zip(lacks, found)]

    def _padded(self, mask: Mask) -> Mask:
        """From `first` on and not from `start`; up to the limit."""
        if self.first == self.start:
            return mask[: self.limit - self.start]
        padded = np.zeros(self.limit - self.first, dtype=np.bool_)
        padded[self.start - self.first :] = mask[: self.limit - self.start]
        return padded

    def _counts(self, track: Track, mask: Mask, low: int) -> npt.NDArray[np.int32] | None:
        """How many of some pages are needed at each boundary from `low` on, as `_spans` says.

        None for a reach that must be asked about each.
        """
        if track.is_state:
            return mask[low - 1 :].astype(np.int32)
        sums = _sums(mask)
        if track.is_everything:
            begin = self.start - self.first
            return np.asarray(np.maximum(sums[low:] - sums[begin], 0))
        if track.window_pages is None:
            return None
        starts = np.maximum(np.arange(low, len(sums)) - track.window_pages, 0)
        return np.asarray(sums[low:] - sums[starts])

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


def _per_page(track: Track) -> int:
    return 1 if track.is_state else track.slots_per_page


def _sums(mask: Mask) -> npt.NDArray[np.int32]:
    """How many are set before each position, `[n + 1]`."""
    sums = np.zeros(len(mask) + 1, dtype=np.int32)
    np.cumsum(mask, out=sums[1:])
    return sums


def _count(sums: npt.NDArray[np.int32], spans: Sequence[Span]) -> int:
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
    path = matching.follow_key(tree, key, limit)
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
