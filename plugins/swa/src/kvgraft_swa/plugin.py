"""The hooks of the `swa` component.

It implements the two required ones: that pages behind the window go first, that a pin covers the
window alone and that a request is budgeted by its window all follow from its reach.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft import HOST_MIRROR, ComponentDeclaration, Kind, Reach, Trailing, hookimpl
from kvgraft_swa.options import SwaOptions

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext, Component

__all__ = ["create_component", "declare_component"]


@hookimpl
def declare_component() -> ComponentDeclaration:
    """Paged, at home on DEVICE, mirrored on HOST. Contract: P2 P3 P7 P8."""
    return ComponentDeclaration(
        name="swa",
        api_version="1.0",
        kind=Kind.PAGED,
        summary="sliding-window attention: the last `window` tokens before the boundary",
        options=SwaOptions,
        capabilities=frozenset({HOST_MIRROR}),
    )


@hookimpl
def create_component(options: SwaOptions, context: BuildContext) -> Component:
    """Pools of keys and values, one slot per page.

    Raises:
        ConfigError: a pool smaller than one page.
    """
    from kvgraft.pools import Component, attention_planes, paged_pools

    planes = attention_planes(options, context.page_size)
    device, host = paged_pools(options, context, planes)
    return Component(Reach(Trailing(options.window)), device, host)
