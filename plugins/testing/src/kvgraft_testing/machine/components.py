"""Small companion components of any reach, with only the required hooks.

`references()` has one of each of three kinds, so that a component can be tested beside others where
only the core is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from pydantic import PositiveInt

from kvgraft.config import ComponentOptions
from kvgraft.contract import COPY_ON_WRITE, HOST_MIRROR
from kvgraft.hookspecs import hookimpl
from kvgraft.packages.registry import Plugin, load_plugin
from kvgraft.pools import BuildContext, Component, DevicePool, HostMirror, PlaneSpec
from kvgraft.reach import Reach
from kvgraft.terms import Everything, StateAt, Trailing
from kvgraft.types import ComponentDeclaration, ComponentMatch, Kind, MatchView
from kvgraft_testing.machine.sizes import STATES, Options, Sizes

__all__ = [
    "REFERENCE_OPTIONS",
    "narrow_window",
    "paged_plugin",
    "references",
    "state_plugin",
]

BROAD = 24
"""Numbers in a slot of the component that needs everything: enough for a grid of points."""

WINDOW = 5
"""Tokens of the reference window: not a multiple of 2 or 4."""


def _planes(width: int = 4) -> list[PlaneSpec]:
    return [PlaneSpec(layer, "kv", (width,), torch.bfloat16) for layer in range(2)]


class _PagedPackage:
    """A paged component of any reach; it implements the two required hooks and nothing else."""

    def __init__(
        self, name: str, reach: Reach, slots_per_page: int, width: int, *, mirrored: bool
    ) -> None:
        self._name = name
        self._reach = reach
        self._slots_per_page = slots_per_page
        self._width = width
        self._mirrored = mirrored

    @hookimpl
    def declare_component(self) -> ComponentDeclaration:
        """Paged, at home on DEVICE."""
        return ComponentDeclaration(
            name=self._name,
            api_version="1.0",
            kind=Kind.PAGED,
            summary=f"pages to test with: {self._reach}",
            options=ComponentOptions,
            capabilities=frozenset({HOST_MIRROR} if self._mirrored else ()),
        )

    @hookimpl
    def create_component(self, options: ComponentOptions, context: BuildContext) -> Component:
        """Pools of two layers."""
        planes, per_page = _planes(self._width), self._slots_per_page
        device_tokens = options.device_tokens or context.device_tokens
        host_tokens = context.host_tokens if options.host_tokens is None else options.host_tokens
        n_host = context.pages(host_tokens) * per_page
        return Component(
            self._reach,
            DevicePool(planes, context.pages(device_tokens) * per_page, context.device),
            HostMirror(planes, n_host) if self._mirrored and n_host else None,
            per_page,
        )


class StateOptions(ComponentOptions):
    """The number of states.

    Attributes:
        states: on DEVICE.
        host_states: on HOST.
    """

    states: PositiveInt = STATES
    host_states: PositiveInt = 6


class _StatePackage:
    """A state component that captures its state where a request leaves a known prefix."""

    def __init__(self, name: str, *, mirrored: bool, can_copy: bool) -> None:
        self._name = name
        self._capabilities = frozenset(
            capability
            for capability, has in ((HOST_MIRROR, mirrored), (COPY_ON_WRITE, can_copy))
            if has
        )

    @hookimpl
    def declare_component(self) -> ComponentDeclaration:
        """A state, at home on DEVICE."""
        return ComponentDeclaration(
            name=self._name,
            api_version="1.0",
            kind=Kind.STATE,
            summary="a state to test with",
            options=StateOptions,
            capabilities=self._capabilities,
        )

    @hookimpl
    def create_component(self, options: StateOptions, context: BuildContext) -> Component:
        """Pools of two layers, one slot per state."""
        planes = _planes()
        mirrored = HOST_MIRROR in self._capabilities and context.host_tokens
        return Component(
            Reach(StateAt()),
            DevicePool(planes, options.states, context.device),
            HostMirror(planes, options.host_states) if mirrored else None,
        )

    @hookimpl
    def finalize_match_result(self, component: Component, view: MatchView) -> ComponentMatch | None:
        """Capture where the request departs from others' data."""
        del component
        if view.anchor < view.base <= view.limit:
            return ComponentMatch(view.anchor, (view.base,))
        return None


def paged_plugin(
    name: str, reach: Reach, slots_per_page: int = 1, *, width: int = 4, mirrored: bool = True
) -> Plugin:
    """A paged component of the given reach, with `width` numbers a slot and layer."""
    package = _PagedPackage(name, reach, slots_per_page, width, mirrored=mirrored)
    return load_plugin(name, package)


def state_plugin(name: str, *, mirrored: bool = True, can_copy: bool = True) -> Plugin:
    """A state component; one that cannot copy refuses to be written to after a hit (M8)."""
    return load_plugin(name, _StatePackage(name, mirrored=mirrored, can_copy=can_copy))


@lru_cache(maxsize=1)
def references() -> tuple[Plugin, Plugin, Plugin]:
    """Companions: everything before a boundary, the last tokens, and a state."""
    return (
        paged_plugin("reference_everything", Reach(Everything()), width=BROAD),
        paged_plugin("reference_window", Reach(Trailing(WINDOW))),
        state_plugin("reference_state"),
    )


@lru_cache(maxsize=1)
def narrow_window() -> Plugin:
    """The reference window beside a component that pins more than its reach.

    A component's pins must lie inside those of wider ones (T6), so its company is narrow.
    """
    return paged_plugin("reference_window", Reach(Trailing(1)))


def _window(sizes: Sizes) -> Mapping[str, Any]:
    """A pool smaller than the others', so that it is short on its own."""
    window = -(-WINDOW // sizes.page_size)
    return {
        "device_tokens": (sizes.device // 2 + window) * sizes.page_size,
        "host_tokens": sizes.host * 2 // 3 * sizes.page_size,
    }


REFERENCE_OPTIONS: dict[str, Options] = {
    "reference_window": _window,
    "reference_state": lambda sizes: {"states": sizes.states},
}
"""Options of the companions."""
