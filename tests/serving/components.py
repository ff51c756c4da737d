"""Third-party components, as a package outside the workspace would write them."""

from __future__ import annotations

import torch
from pydantic import PositiveInt

from kvgraft import (
    COPY_ON_WRITE,
    HOST_MIRROR,
    BuildContext,
    Component,
    ComponentDeclaration,
    ComponentOptions,
    DevicePool,
    HostMirror,
    Kind,
    PlaneSpec,
    Reach,
    StateAt,
    hookimpl,
)

__all__ = ["PagedPackage", "StatePackage"]

PLANES = [PlaneSpec(layer, name, (4,), torch.bfloat16) for layer in (0, 1) for name in ("a", "b")]


class PagedPackage:
    """A paged component of any reach; the two required hooks and nothing else."""

    def __init__(self, name: str, reach: Reach, slots_per_page: int = 1) -> None:
        self.name, self.reach, self.slots_per_page = name, reach, slots_per_page

    @hookimpl
    def declare_component(self) -> ComponentDeclaration:
        return ComponentDeclaration(
            name=self.name,
            api_version="1.0",
            kind=Kind.PAGED,
            summary=f"a component of the tests: {self.reach}",
            options=ComponentOptions,
            capabilities=frozenset({HOST_MIRROR}),
        )

    @hookimpl
    def create_component(self, options: ComponentOptions, context: BuildContext) -> Component:
        device_tokens = options.device_tokens or context.device_tokens
        host_tokens = context.host_tokens if options.host_tokens is None else options.host_tokens
        n_host = context.pages(host_tokens) * self.slots_per_page
        n_device = context.pages(device_tokens) * self.slots_per_page
        return Component(
            self.reach,
            DevicePool(PLANES, n_device, context.device),
            HostMirror(PLANES, n_host) if n_host else None,
            self.slots_per_page,
        )


class StateOptions(ComponentOptions):
    """Pool sizes in states."""

    states: PositiveInt = 16
    host_states: PositiveInt = 16


class StatePackage:
    """A recurrent state without opinions on where to capture it."""

    def __init__(self, name: str, *, can_copy: bool = True) -> None:
        self.name, self.can_copy = name, can_copy

    @hookimpl
    def declare_component(self) -> ComponentDeclaration:
        return ComponentDeclaration(
            name=self.name,
            api_version="1.0",
            kind=Kind.STATE,
            summary="a state of the tests",
            options=StateOptions,
            capabilities=frozenset({HOST_MIRROR} | ({COPY_ON_WRITE} if self.can_copy else set())),
        )

    @hookimpl
    def create_component(self, options: StateOptions, context: BuildContext) -> Component:
        return Component(
            Reach(StateAt()),
            DevicePool(PLANES, options.states, context.device),
            HostMirror(PLANES, options.host_states) if context.host_tokens else None,
        )
