"""How far a decoding request goes before more is due than to count its tokens."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.requests.publishing import BEHIND_TOKENS
from kvgraft.requests.request import Request
from kvgraft.tree.pinning import NO_PAGE, Receipt
from kvgraft.tree.tree import Tree

__all__ = ["NO_EVICT_FIRST", "EvictFirstSchedule", "evict_first_schedule", "slides_from"]


class EvictFirstSchedule(NamedTuple):
    """When a decoding request has pages to evict first: those behind its reaches.

    Attributes:
        page: at this boundary at the latest.
        behind: from this boundary on, some are behind its reaches.
        low_pages: they are handed over once so many pages have slots: no more are promised.
    """

    page: int
    behind: int
    low_pages: int


NO_EVICT_FIRST = EvictFirstSchedule(NO_PAGE, NO_PAGE, NO_PAGE)
"""Where every page is needed."""


def evict_first_schedule(request: Request, following: int, size: int) -> EvictFirstSchedule:
    """When `Publisher.leave_behind` has something to do for a decoding request, as far as known.

    `following` is the next boundary, `size` the tokens of a page.
    """
    collects = -(-BEHIND_TOKENS // size) if size < BEHIND_TOKENS else 1
    page = behind = pages = NO_PAGE
    for part in request.bounded_components:
        component = part.component
        pages = min(pages, part.account.promised // component.slots_per_page)
        window = component.window_pages
        first = part.first_page if part.holds_pages else request.allocated
        if window is None:
            page = behind = following
        else:
            page = min(page, first + window + collects)
            behind = min(behind, first + window + 1)
    return EvictFirstSchedule(page, behind, request.allocated + max(0, pages))


def slides_from(tree: Tree, receipt: Receipt, following: int) -> int:
    """The first page position at which `pinning.slide` unpins something; `following` where any may.

    It holds until a node is split (`Tree.n_splits`). NO_PAGE where there is nothing to unpin.
    """
    page = NO_PAGE
    for component in tree.components:
        segment = receipt.segments[component.index]
        if not segment or component.is_prefix_closed:
            continue
        window = component.window_pages
        if component.is_state or window is None or len(segment) > 1:
            return following
        start, end = segment[0]
        node = receipt.anchor
        while node.start > start:
            node = node.parent  # type: ignore[assignment]
        page = min(page, min(node.end, end) + window)
    return page
