"""The slots a request will need, derived from reach (A1, A3, A4, A10).

A component whose hook `budget_contribution` returns None is budgeted here. The peak of a paged
component with bounded reach follows from the life of its pages: a chunk's pages are allocated
while those the previous chunk left inside the reach are still held, everything further back has
been given back. So with several chunks to come it is reach + chunk, with one it is the larger of
the two; never the window twice.
"""

from __future__ import annotations

from typing import Final

from kvgraft.tree.component import TreeComponent
from kvgraft.types import Demand, DemandQuery, new_demand

__all__ = ["SLACK_PAGES", "default_demand", "pages_up"]

SLACK_PAGES: Final = 1
"""Pages kept beyond the computed need, so that one token more than foreseen has its page (A1)."""


def pages_up(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens`, rounded up."""
    return -(-tokens // page_size)


def default_demand(component: TreeComponent, query: DemandQuery) -> Demand:
    """A request's demand on one component's DEVICE pool, in its slots."""
    if component.is_state:
        # The live state, one per boundary to capture, one that follows a decode.
        decodes = int(query.total > query.prompt)
        return new_demand((1 + query.host_slots, query.checkpoints + decodes, ()))
    page_size, computed, step, prompt, tokens, host_slots, _ = query
    held = -(-computed // page_size)
    last = -(-tokens // page_size)
    total = component.stored_between(held, last + SLACK_PAGES)
    chunk = component.stored_between(held, -(-(computed + step) // page_size))
    peak = total
    if not component.is_prefix_closed:
        reach = component.reach_pages.width(last)
        extend = component.stored_between(held, -(-prompt // page_size))
        if extend > chunk:
            peak = min(total, reach + chunk + 1)
        else:
            peak = min(total, max(extend, reach + 1) + SLACK_PAGES)
    per_page = component.slots_per_page
    now = min(peak, chunk + SLACK_PAGES)
    return new_demand((now * per_page + host_slots, (peak - now) * per_page, ()))
