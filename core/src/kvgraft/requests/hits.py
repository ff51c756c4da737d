"""Counts what admitted requests reuse, by tier: in tokens, and in every component's slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from kvgraft.compiled import mypyc_attr
from kvgraft.requests.request import Request
from kvgraft.stats import SlotHits
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.operations import load_plan
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

ANCHORS_AT_ONCE: Final = 256
"""Anchors whose slots are counted in bulk."""


class Loaded(NamedTuple):
    """The part of a request's prefix that is on HOST alone.

    Attributes:
        slots: per component, in the tree's order, the needed slots that DEVICE lacks, and those
            that come from the other tiers; empty where there is nothing to load.
    """

    slots: Sequence[tuple[int, SlotHits]]

    def hits(self, components: Sequence[TreeComponent], pages: int) -> list[SlotHits]:
        """The slots per component that a request with a prefix of some pages resumes from."""
        needed = [_slots_within(each, 0, pages, each.needed_pages(pages)) for each in components]
        if not self.slots:
            return [SlotHits(n_slots, 0, 0) for n_slots in needed]
        return [
            others._replace(device=n_slots - missing)
            for n_slots, (missing, others) in zip(needed, self.slots)
        ]


NOTHING = Loaded(())


@mypyc_attr(allow_interpreted_subclasses=True)
class HitCounts:
    """Hits since the cache was made.

    A request's tokens count once, when it is first admitted; slots that it resumes from count each
    time.

    Attributes:
        admitted: admissions counted.
        asked: tokens of the requests' prompts.
        device, host, storage: those of them that need not be computed, by tier.
        recomputed: tokens that requests had when they were retracted or restarted, and had to
            compute again.
    """

    __slots__ = (
        *("_anchors", "_slots", "_tree"),
        *("admitted", "asked", "device", "host", "recomputed", "storage"),
    )

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.admitted = self.asked = self.device = self.host = self.storage = self.recomputed = 0
        self._slots = [[0, 0, 0] for _ in tree.components]
        self._anchors: dict[int, int] = {}
        """Hits by anchor in pages, whose slots are not counted yet: that is done in bulk."""

    def count(self, request: Request) -> Loaded:
        """Count an admitted request before its load-back; returns the part that it will load.

        O(1) where all of its prefix is on DEVICE, else O(nodes of the prefix).
        """
        self.admitted += 1
        loaded, anchor = NOTHING, request.anchor_tokens
        if anchor:
            anchors, pages = self._anchors, anchor // self._tree.page_size
            anchors[pages] = anchors.get(pages, 0) + 1
            if len(anchors) > ANCHORS_AT_ONCE:
                for counts, slots in zip(self._slots, self._slots_at_anchors()):
                    counts[0] += slots
                self._anchors = {}
            if request.device_tokens != anchor:
                loaded = self._count_loaded(request)
        key = request.key
        request.continues = key.counted >= 0
        if request.continues:
            self.recomputed += max(0, key.counted - anchor)
            key.counted = -1
        else:
            self.asked += request.prompt
            self.device += request.device_tokens
            self.host += anchor - request.device_tokens - request.storage_tokens
            self.storage += request.storage_tokens
        return loaded

    def _slots_at_anchors(self) -> list[int]:
        """Slots per component that hits needed and that are not counted yet; changes nothing."""
        anchors = list(self._anchors.items())
        return [
            sum(
                hits * _slots_within(component, 0, pages, component.needed_pages(pages))
                for pages, hits in anchors
            )
            for component in self._tree.components
        ]

    def _count_loaded(self, request: Request) -> Loaded:
        """Correct the counts of a prefix that was counted as on DEVICE: some is on HOST alone."""
        tree, fetched = self._tree, request.fetched
        size, anchor = tree.page_size, request.anchor_tokens
        plans = load_plan(request.receipt, tree.components)
        loaded: list[tuple[int, SlotHits]] = []
        for part, nodes, counts in zip(request.components, plans, self._slots):
            component = part.component
            needed = component.needed_pages(anchor // size)
            missing = brought = 0
            for node in nodes:
                missing += _slots_within(component, node.start, node.end, needed)
                brought += _slots_within(component, node.start, node.end, (fetched,))
            loaded.append((missing, SlotHits(0, part.host_slots - brought, brought)))
            counts[0] -= missing
            counts[1] += part.host_slots - brought
            counts[2] += brought
        return Loaded(loaded)

    def of_components(self) -> list[SlotHits]:
        """The hits in slots, per component, in the tree's order."""
        return [
            SlotHits(device + slots, host, storage)
            for (device, host, storage), slots in zip(self._slots, self._slots_at_anchors())
        ]

    def of_tenants(self) -> dict[str, Any]:
        """The tenants' hits and slots by name; empty without tenants."""
        return {}


def _slots_within(component: TreeComponent, start: int, end: int, spans: Sequence[Span]) -> int:
    """Slots of pages `[start, end)` that are inside `spans`; a state stands for the last page."""
    if component.is_state:
        return sum([span.start < end <= span.end for span in spans])
    shared = sum([max(0, min(end, span.end) - max(start, span.start)) for span in spans])
    return shared * component.slots_per_page
