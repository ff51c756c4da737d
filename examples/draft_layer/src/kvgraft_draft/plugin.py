"""The hooks of the `draft` component.

A draft layer's entry of position i is computed from the model's hidden state there and from the
token that follows. It depends on tokens up to i + 1, and so it is written where token i + 1 is:

    token         t0    t1       t2       t3    │  t4       pages of 4
    its slot      -    h0,t1    h1,t2    h2,t3  │ h3,t4
    `hidden`                                 h3 │           of the page's last token

The data of a page then depends on the tokens of the page and before, as in every other component:
a page that two continuations share holds nothing of either (G5). A request that resumes behind it
computes (h3, t4) from the page's `hidden`, which the model does not compute again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft import HOST_MIRROR, ComponentDeclaration, Everything, Kind, Reach, hookimpl
from kvgraft_draft.options import DraftOptions

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext, Component

__all__ = ["create_component", "declare_component"]


@hookimpl
def declare_component() -> ComponentDeclaration:
    """Paged, at home on DEVICE, mirrored on HOST. Contract: P2 P3 P7 P8 G5."""
    return ComponentDeclaration(
        name="draft",
        api_version="1.0",
        kind=Kind.PAGED,
        summary="layers of a draft model; a slot takes the hidden state of the token before",
        options=DraftOptions,
        capabilities=frozenset({HOST_MIRROR}),
    )


@hookimpl
def create_component(options: DraftOptions, context: BuildContext) -> Component:
    """Pools of keys and values, and of a hidden state, one slot per page.

    Raises:
        ConfigError: a pool smaller than one page.
    """
    from kvgraft.pools import Component, PlaneSpec, attention_planes, paged_pools

    planes = attention_planes(options, context.page_size)
    hidden = PlaneSpec(planes[0].layer, "hidden", (options.hidden,), planes[0].dtype)
    device, host = paged_pools(options, context, [hidden, *planes])
    return Component(Reach(Everything()), device, host)
