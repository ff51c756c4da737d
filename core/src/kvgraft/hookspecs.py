"""The hooks a component package implements.

Two are required: `declare_component` says what the package is, `create_component` builds it. The
rest follow from the declared reach; a component implements one only where it differs, and a hook
that has an inverse together with it. Hooks run on the scheduler thread, once per operation and
never per node; none may block. An exception in a hook leaves the cache as it was before the call
and is raised again with the component's name (I8).

A package is a module, or any object, whose functions are marked with `hookimpl`:

    from kvgraft import hookimpl

    @hookimpl
    def declare_component() -> ComponentDeclaration: ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

from kvgraft.contract import PROJECT
from kvgraft.types import (
    ComponentDeclaration,
    ComponentMatch,
    Demand,
    DemandQuery,
    LockQuery,
    MatchView,
    Span,
    TransferQuery,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvgraft.pools import BuildContext, Component
    from kvgraft.pools.component import PlaneCopy

__all__ = ["INVERSES", "REQUIRED", "hookimpl", "hookspec"]

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a component's package as its hook of that name."""

REQUIRED = ("declare_component", "create_component")
"""Hooks without which a package is refused (P6)."""

INVERSES = (
    ("acquire_component_lock", "release_component_lock"),
    ("build_hicache_transfers", "commit_hicache_transfers"),
    ("build_hicache_transfers", "abort_hicache_transfers"),
)
"""Hooks that come in pairs: an implementation of the first needs the second."""


@hookspec(firstresult=True)
def declare_component() -> ComponentDeclaration:  # type: ignore[empty-body]
    """Say what the component is.

    Called once at load, without torch (P2). Contract: P3 P7 P8.
    """


@hookspec(firstresult=True)
def create_component(  # type: ignore[empty-body]
    options: BaseModel, context: BuildContext
) -> Component:
    """Build the component's pools for one cache.

    Args:
        options: the declared options model, validated.
        context: page size, device and sizes.

    Raises:
        ConfigError: options that cannot work together with the context, naming the field.
    """


@hookspec(firstresult=True)
def finalize_match_result(component: Component, view: MatchView) -> ComponentMatch | None:
    """Shorten or annotate a match; None leaves it unchanged.

    Runs after the anchor is found and before anything is pinned. May lower the anchor, never
    raise it, and may name boundaries at which the request should capture a state. Must not
    allocate. Contract: M4 M5 M6.
    """


@hookspec(firstresult=True)
def acquire_component_lock(component: Component, query: LockQuery) -> Sequence[Span] | None:
    """The pages to pin for a request resuming at a boundary; None pins the reach.

    The spans must contain the reach at the boundary and lie inside the pins of every wider
    component. Contract: L1 L3 L7 T6.
    """


@hookspec(firstresult=True)
def release_component_lock(component: Component, segment: Sequence[Span]) -> None:
    """Undo the side effects of `acquire_component_lock` for `segment`. Contract: L1 L2."""


@hookspec(firstresult=True)
def build_hicache_transfers(
    component: Component, query: TransferQuery
) -> Sequence[PlaneCopy] | None:
    """The copies that move the query's slots; None pairs the planes of pool and mirror.

    Runs when the transfer is reserved. Order the copies by layer: the data of a layer can be read
    as soon as its copies are done. Contract: B2 B3 B4 R4 R7.
    """


@hookspec(firstresult=True)
def commit_hicache_transfers(component: Component, query: TransferQuery) -> None:
    """The transfer is acknowledged and its data published. Contract: B3 R7."""


@hookspec(firstresult=True)
def abort_hicache_transfers(component: Component, query: TransferQuery) -> None:
    """The transfer failed or was cancelled; its slots are free again. Contract: R2."""


@hookspec(firstresult=True)
def budget_contribution(component: Component, query: DemandQuery) -> Demand | None:
    """The slots a request needs of this component's pools; None uses the reach's default.

    Contract: A1 A3 A4 A10 H7.
    """
