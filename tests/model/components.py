"""Third-party components, as a package outside the workspace would write them."""

from __future__ import annotations

import torch

from kvgraft import (
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
    hookimpl,
)
from kvgraft.registry import Plugin, load_plugin

__all__ = ["paged_plugin"]


class _PagedPackage:
    """A paged component of any reach; it implements the two required hooks and nothing else."""

    def __init__(self, name: str, reach: Reach, slots_per_page: int, *, mirrored: bool) -> None:
        self._name = name
        self._reach = reach
        self._slots_per_page = slots_per_page
        self._mirrored = mirrored

    @hookimpl
    def declare_component(self) -> ComponentDeclaration:
        return ComponentDeclaration(
            name=self._name,
            api_version="1.0",
            kind=Kind.PAGED,
            summary=f"a component of the tests: {self._reach}",
            options=ComponentOptions,
            capabilities=frozenset({HOST_MIRROR} if self._mirrored else ()),
        )

    @hookimpl
    def create_component(self, options: ComponentOptions, context: BuildContext) -> Component:
        planes = [PlaneSpec(layer, "kv", (4,), torch.bfloat16) for layer in range(2)]
        per_page = self._slots_per_page
        device_tokens = options.device_tokens or context.device_tokens
        host_tokens = context.host_tokens if options.host_tokens is None else options.host_tokens
        n_host = context.pages(host_tokens) * per_page
        return Component(
            self._reach,
            DevicePool(planes, context.pages(device_tokens) * per_page, context.device),
            HostMirror(planes, n_host) if self._mirrored and n_host else None,
            per_page,
        )


def paged_plugin(
    name: str, reach: Reach, slots_per_page: int = 1, *, mirrored: bool = True
) -> Plugin:
    """A checked plugin of the given reach."""
    return load_plugin(name, _PagedPackage(name, reach, slots_per_page, mirrored=mirrored))
