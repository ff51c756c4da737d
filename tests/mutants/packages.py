"""A component with any hook, any of which a test may replace by a wrong one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt

from kvgraft import (
    COPY_ON_WRITE,
    HOST_MIRROR,
    BuildContext,
    Component,
    ComponentDeclaration,
    ComponentOptions,
    ConfigError,
    DevicePool,
    HostMirror,
    Kind,
    PlaneSpec,
    Reach,
    StateAt,
    Tier,
    Trailing,
    hookimpl,
)
from kvgraft.pools import PrivatePool

__all__ = ["Package", "paged", "planes", "state"]

WINDOW = 5

Hook = Callable[..., Any]


class StateOptions(ComponentOptions):
    """States on DEVICE and on HOST."""

    states: PositiveInt = 7
    host_states: PositiveInt = 6


class Lax(BaseModel):
    """Options that accept unknown fields."""

    model_config = ConfigDict(extra="ignore")


def planes(page_size: int = 1) -> list[PlaneSpec]:
    """Two layers of two planes."""
    return [
        PlaneSpec(layer, name, (page_size, 4), torch.bfloat16)
        for layer in range(2)
        for name in ("k", "v")
    ]


@dataclass(frozen=True)
class Package:
    """The parts of a mutant: declaration, pools, hooks.

    Attributes:
        kind: paged or state.
        reach: the reach declared.
        capabilities: the capabilities declared.
        options: its options model.
        api_version: the version declared; a callable is asked each time.
        home: tier of the canonical copy.
        device, host: classes of its pools.
        private: private pools by name and slots.
        hooks: hooks beside the two required ones, unmarked; `hookimpl` is put on unless in `bare`.
        bare: hooks without `hookimpl`.
        slots_per_page: slots a page takes.
        mirror: whether there is a host mirror, if the cache has host memory.
        multiple: tokens of which a page must be whole multiples.
    """

    kind: Kind = Kind.PAGED
    reach: Reach = field(default_factory=lambda: Reach(Trailing(WINDOW)))
    capabilities: frozenset[str] = frozenset({HOST_MIRROR})
    options: type[BaseModel] = ComponentOptions
    api_version: str | Callable[[], str] = "1.0"
    home: Tier = Tier.DEVICE
    device: type[DevicePool] = DevicePool
    host: type[HostMirror] = HostMirror
    private: Mapping[str, int] = field(default_factory=dict)
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    bare: frozenset[str] = frozenset()
    slots_per_page: int = 1
    mirror: bool = True
    multiple: int = 1

    def implementation(self, name: str) -> SimpleNamespace:
        """The object with the hooks, as a package's module would be."""

        @hookimpl
        def declare_component() -> ComponentDeclaration:
            version = self.api_version
            return ComponentDeclaration(
                name=name,
                api_version=version if isinstance(version, str) else version(),
                kind=self.kind,
                summary="a mutant",
                options=self.options,
                home=self.home,
                capabilities=self.capabilities,
            )

        @hookimpl
        def create_component(options: Any, context: BuildContext) -> Component:
            if context.page_size % self.multiple:
                said = f"page_size={context.page_size} is no multiple of {self.multiple}"
                raise ConfigError(said)
            specs = planes(context.page_size)
            if self.kind is Kind.STATE:
                n_device, n_host = options.states, options.host_states * bool(context.host_tokens)
            else:
                n_device = context.pages(context.device_tokens) * self.slots_per_page
                n_host = context.pages(context.host_tokens) * self.slots_per_page
            on_device = specs[:2] if self.home is Tier.HOST else specs
            return Component(
                self.reach,
                self.device(on_device, n_device, context.device),
                self.host(specs, n_host) if n_host and self.mirror else None,
                self.slots_per_page,
                tuple(_private(pool, slots) for pool, slots in self.private.items()),
            )

        found = {"declare_component": declare_component, "create_component": create_component}
        for hook, function in self.hooks.items():
            found[hook] = function if hook in self.bare else hookimpl(function)
        return SimpleNamespace(**found)


def _private(name: str, slots: int) -> PrivatePool:
    from kvgraft.pools.allocator import SlotAllocator

    return PrivatePool(name, SlotAllocator(slots))


def paged(**given: Any) -> Package:
    """A window of five tokens, mirrored."""
    return Package(**given)


def state(**given: Any) -> Package:
    """A state, mirrored, copied on write."""
    defaults: dict[str, Any] = {
        "kind": Kind.STATE,
        "reach": Reach(StateAt()),
        "capabilities": frozenset({HOST_MIRROR, COPY_ON_WRITE}),
        "options": StateOptions,
    }
    return Package(**{**defaults, **given})
