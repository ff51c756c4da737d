"""The hooks of the `mamba` component.

Besides the two required ones it annotates matches: an engine may want states at regular
boundaries, beside the resume points that the core decides on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft import (
    COPY_ON_WRITE,
    HOST_MIRROR,
    ComponentDeclaration,
    ComponentMatch,
    Kind,
    MatchView,
    hookimpl,
)
from kvgraft_mamba.options import MambaOptions

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext
    from kvgraft_mamba.pools import StateComponent

__all__ = ["create_component", "declare_component", "finalize_match_result"]


@hookimpl
def declare_component() -> ComponentDeclaration:
    """A state, at home on DEVICE, mirrored on HOST, copied on write. Contract: M8 P2 P3 P7 P8."""
    return ComponentDeclaration(
        name="mamba",
        api_version="1.0",
        kind=Kind.STATE,
        summary="recurrent layers: the state exactly at the boundary",
        options=MambaOptions,
        capabilities=frozenset({HOST_MIRROR, COPY_ON_WRITE}),
    )


@hookimpl
def create_component(options: MambaOptions, context: BuildContext) -> StateComponent:
    """Pools of states, one slot each.

    Raises:
        ConfigError: a checkpoint interval that is not whole pages.
    """
    from kvgraft_mamba.pools import build

    return build(options, context)


@hookimpl
def finalize_match_result(component: StateComponent, view: MatchView) -> ComponentMatch | None:
    """Name the boundaries at which the request should capture its state.

    Leaves the anchor as it is and allocates nothing. Cost: O(checkpoints). Contract: M5 M6.
    """
    marks = component.rule.boundaries(view)
    return ComponentMatch(view.anchor, marks) if marks else None
