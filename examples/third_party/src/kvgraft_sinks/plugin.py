"""The hooks of the `sinks` component.

The two required ones are enough: that pages between sinks and window go first, that a pin covers
the two ends alone and that a request is budgeted by them all follow from the reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft import HOST_MIRROR, ComponentDeclaration, Kind, Leading, Reach, Trailing, hookimpl
from kvgraft_sinks.options import SinksOptions

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext, Component

__all__ = ["create_component", "declare_component"]


@hookimpl
def declare_component() -> ComponentDeclaration:
    """Paged, at home on DEVICE, mirrored on HOST. Contract: P2 P3 P7 P8."""
    return ComponentDeclaration(
        name="sinks",
        api_version="1.0",
        kind=Kind.PAGED,
        summary="attention sinks: the first `sinks` tokens and the last `window`",
        options=SinksOptions,
        capabilities=frozenset({HOST_MIRROR}),
    )


@hookimpl
def create_component(options: SinksOptions, context: BuildContext) -> Component:
    """Pools of keys and values, one slot per page, under a reach that is a union.

    Raises:
        ConfigError: a pool smaller than one page.
    """
    # Found when a cache is built: finding the package must not import torch (P2).
    from kvgraft.pools import Component, attention_planes, paged_pools

    planes = attention_planes(options, context.page_size)
    device, host = paged_pools(options, context, planes)
    return Component(Reach(Leading(options.sinks), Trailing(options.window)), device, host)
