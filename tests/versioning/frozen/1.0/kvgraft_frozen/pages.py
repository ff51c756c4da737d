"""Pages under full attention, with every hook that API 1.0 has.

Each hook reads every field of what it is given and does by hand what the core would do without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import PositiveInt

from kvgraft import (
    HOST_MIRROR,
    AttentionOptions,
    ComponentDeclaration,
    ComponentMatch,
    Demand,
    DemandQuery,
    Direction,
    Kind,
    LockQuery,
    MatchView,
    Span,
    Tier,
    TransferQuery,
    hookimpl,
)

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext
    from kvgraft.transfers import PlaneCopy
    from kvgraft_frozen.pools import PagesComponent


class PagesOptions(AttentionOptions):
    """Options of `frozen_pages`."""

    scratch: PositiveInt = 2


@hookimpl
def declare_component() -> ComponentDeclaration:
    return ComponentDeclaration(
        name="frozen_pages",
        api_version="1.0",
        kind=Kind.PAGED,
        summary="full attention as of API 1.0, every hook implemented",
        options=PagesOptions,
        home=Tier.DEVICE,
        capabilities=frozenset({HOST_MIRROR}),
    )


@hookimpl
def create_component(options: PagesOptions, context: BuildContext) -> PagesComponent:
    from kvgraft_frozen.pools import build_pages

    return build_pages(options, context)


@hookimpl
def finalize_match_result(component: PagesComponent, view: MatchView) -> ComponentMatch | None:
    component.calls["finalize_match_result"] += 1
    assert 0 <= view.device_anchor <= view.anchor <= min(view.base, view.limit)
    assert 0 <= view.host_slots <= view.anchor
    return ComponentMatch(view.anchor)


@hookimpl
def acquire_component_lock(component: PagesComponent, query: LockQuery) -> Sequence[Span] | None:
    component.calls["acquire_component_lock"] += 1
    assert query.page_size == component.page_size
    spans = [Span(start=0, end=query.boundary)] if query.boundary else []
    component.held.append(spans)
    return spans


@hookimpl
def release_component_lock(component: PagesComponent, segment: Sequence[Span]) -> None:
    component.calls["release_component_lock"] += 1
    component.held.remove(list(segment))


@hookimpl
def build_hicache_transfers(
    component: PagesComponent, query: TransferQuery
) -> Sequence[PlaneCopy] | None:
    from kvgraft_frozen.pools import copies

    component.calls[f"build_hicache_transfers {query.direction.value}"] += 1
    component.moving += 1
    assert query.direction in (Direction.BACKUP, Direction.LOAD_BACK)
    return copies(component, query)


@hookimpl
def commit_hicache_transfers(component: PagesComponent, query: TransferQuery) -> None:
    component.calls["commit_hicache_transfers"] += 1
    component.moving -= 1


@hookimpl
def abort_hicache_transfers(component: PagesComponent, query: TransferQuery) -> None:
    component.calls["abort_hicache_transfers"] += 1
    component.moving -= 1


@hookimpl
def budget_contribution(component: PagesComponent, query: DemandQuery) -> Demand | None:
    component.calls["budget_contribution"] += 1
    assert query.page_size == component.page_size
    assert query.computed >= 0
    assert 0 < query.prompt <= query.total
    assert query.checkpoints >= 0
    held = -(-query.computed // query.page_size)
    total = -(-query.total // query.page_size) - held + 1
    now = min(total, -(-(query.computed + query.chunk) // query.page_size) - held + 1)
    return Demand(now + query.host_slots, total - now, private=(component.scratch,))
