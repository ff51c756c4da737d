"""Where the prefix that a request resumes from was when it was matched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraft.cache import Cache
from kvgraft.requests.request import Request
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.operations import load_plan, segment_nodes
from kvgraft.types import Span

__all__ = ["Hits", "SlotHits", "hits_of"]


class SlotHits(NamedTuple):
    """Slots of one component that a match found, by tier; all but `device` are loaded back."""

    device: int
    host: int
    storage: int


class Hits(NamedTuple):
    """A match by tier, in tokens; together they are its anchor.

    Attributes:
        device: tokens that could be resumed from without a copy.
        host: tokens on HOST.
        storage: tokens on HOST only because STORAGE brought them while the request was queued.
        slots: per component, in its own slots.
    """

    device: int
    host: int
    storage: int
    slots: dict[str, SlotHits]

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.device + self.host + self.storage

    def at_most(self, n_tokens: int) -> Hits:
        """The first `n_tokens` of it: tokens of the farthest tier are dropped first."""
        device = min(self.device, n_tokens)
        host = min(self.host, n_tokens - device)
        return self._replace(
            device=device, host=host, storage=min(self.storage, n_tokens - device - host)
        )


def hits_of(cache: Cache, request: Request, fetched: Span) -> Hits:
    """The hits of a request's match, before the load-back.

    Args:
        cache: the request's.
        request: admitted.
        fetched: the pages of its prefix that its prefetch made resumable.
    """
    components, size = cache.tree.components, cache.tree.page_size
    anchor, device = request.anchor_tokens, request.device_tokens
    storage = max(0, min(anchor, fetched.end * size) - max(device, fetched.start * size))
    slots = {}
    for component, nodes in zip(components, load_plan(request.receipt, components)):
        brought = _slots_within(component, nodes, fetched)
        loaded = request.parts[component.index].host_slots
        slots[component.name] = SlotHits(_held_slots(request, component), loaded - brought, brought)
    return Hits(device, anchor - device - storage, storage, slots)


def _slots_within(component: TreeComponent, nodes: Sequence[Node], pages: Span) -> int:
    """Slots that nodes hold of some pages; a state's is that of the last page before it."""
    if component.is_state:
        return sum(pages.start < node.end <= pages.end for node in nodes)
    shared = (min(node.end, pages.end) - max(node.start, pages.start) for node in nodes)
    return sum(max(0, n) for n in shared) * component.slots_per_page


def _held_slots(request: Request, component: TreeComponent) -> int:
    """DEVICE slots of a component that the request's match found."""
    return sum(
        component.n_slots(node)
        for node in segment_nodes(component, request.receipt)
        if node.cells[component.index].device is not None
    )
