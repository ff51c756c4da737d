"""The hooks of the `full` component.

It implements the two required ones. Everything else follows from its reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft import (
    HOST_MIRROR,
    AttentionOptions,
    ComponentDeclaration,
    Everything,
    Kind,
    Reach,
    hookimpl,
)

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext, Component

__all__ = ["create_component", "declare_component"]


@hookimpl
def declare_component() -> ComponentDeclaration:
    """Paged, at home on DEVICE, mirrored on HOST. Contract: P2 P3 P7 P8."""
    return ComponentDeclaration(
        name="full",
        api_version="1.0",
        kind=Kind.PAGED,
        summary="full attention: all tokens before the boundary",
        options=AttentionOptions,
        capabilities=frozenset({HOST_MIRROR}),
    )


@hookimpl
def create_component(options: AttentionOptions, context: BuildContext) -> Component:
    """Pools of keys and values, one slot per page.

    Raises:
        ConfigError: a pool smaller than one page.
    """
    from kvgraft.pools import Component, attention_planes, paged_pools

    planes = attention_planes(options, context.page_size)
    device, host = paged_pools(options, context, planes)
    return Component(Reach(Everything()), device, host)
