"""The hooks of the `hisparse` component.

Besides the two required ones it budgets its hot buffers, which do not follow from a reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft import (
    HOST_MIRROR,
    ComponentDeclaration,
    Demand,
    DemandQuery,
    Kind,
    Tier,
    hookimpl,
)
from kvgraft_hisparse.options import HisparseOptions

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext
    from kvgraft_hisparse.pools import SparseComponent

__all__ = ["budget_contribution", "create_component", "declare_component"]

SLACK_PAGES = 1


@hookimpl
def declare_component() -> ComponentDeclaration:
    """Paged, at home on HOST. Contract: P2 P3 P7 P8."""
    return ComponentDeclaration(
        name="hisparse",
        api_version="1.0",
        kind=Kind.PAGED,
        summary="sparse attention: keys and values on HOST, their indexer keys on DEVICE",
        options=HisparseOptions,
        home=Tier.HOST,
        capabilities=frozenset({HOST_MIRROR}),
    )


@hookimpl
def create_component(options: HisparseOptions, context: BuildContext) -> SparseComponent:
    """Host pool, indexer pool and hot rows.

    Raises:
        ConfigError: no host pool, or a pool smaller than one page.
    """
    from kvgraft_hisparse.pools import build

    return build(options, context)


@hookimpl
def budget_contribution(component: SparseComponent, query: DemandQuery) -> Demand:
    """Indexer rows for the whole request, and one hot buffer held to its end.

    Now: the pages of the next chunk, one page of slack and the pages of a load-back. Later: the
    rest up to the total. The hot buffer is the same in prefill and decode: `hot_tokens` in whole
    pages plus a page for the newest token. Contract: A1 A3 H7 H8.
    """
    held = _pages_up(query.computed, query.page_size)
    total = _pages_up(query.total, query.page_size) - held + SLACK_PAGES
    chunk = _pages_up(query.computed + query.chunk, query.page_size) - held
    now = min(total, chunk + SLACK_PAGES)
    return Demand(now + query.host_slots, total - now, (component.hot_slots,))


def _pages_up(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)
