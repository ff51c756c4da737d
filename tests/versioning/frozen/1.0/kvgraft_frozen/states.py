"""A recurrent state, which names the boundaries worth capturing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from kvgraft import (
    COPY_ON_WRITE,
    HOST_MIRROR,
    ComponentDeclaration,
    ComponentMatch,
    ConfigError,
    Kind,
    LayerOptions,
    MatchView,
    hookimpl,
)

if TYPE_CHECKING:
    from kvgraft.pools import BuildContext, Component


class StatesOptions(LayerOptions):
    """Options of `frozen_states`."""

    states: PositiveInt = 8
    width: PositiveInt = 3


@hookimpl
def declare_component() -> ComponentDeclaration:
    return ComponentDeclaration(
        "frozen_states",
        "1.0",
        Kind.STATE,
        "a recurrent state as of API 1.0",
        StatesOptions,
        capabilities=frozenset({HOST_MIRROR, COPY_ON_WRITE}),
    )


@hookimpl
def create_component(options: StatesOptions, context: BuildContext) -> Component:
    from kvgraft_frozen.pools import build_states

    if options.width > 1024:
        raise ConfigError(f"option width: {options.width} is more than 1024")
    return build_states(options, context)


@hookimpl
def finalize_match_result(component: Component, view: MatchView) -> ComponentMatch | None:
    branch = min(view.base, view.limit)
    if branch <= view.anchor:
        return None
    return ComponentMatch(limit_pages=view.anchor, checkpoint_pages=(branch,))
