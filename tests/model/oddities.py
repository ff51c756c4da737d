"""Components that keep the contract in unusual ways; no alarm may be raised about them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import PositiveInt

from kvgraft import (
    HOST_MIRROR,
    BuildContext,
    Component,
    ComponentDeclaration,
    ComponentOptions,
    ConfigError,
    DevicePool,
    Direction,
    HostMirror,
    Kind,
    PlaneSpec,
    Reach,
    Trailing,
    TransferQuery,
    hookimpl,
)
from kvgraft.packages.registry import Plugin, load_plugin
from kvgraft.pools import slot_index
from kvgraft.transfers import PlaneCopy

__all__ = ["coarse", "joined_on_host", "of_pages", "of_planes", "package", "tiny"]

REACH = Reach(Trailing(5))


class Sized(ComponentOptions):
    """Options with a pool size of their own."""

    slots: PositiveInt = 40


def package(name: str, build: Callable[[Any, BuildContext], Component], **hooks: Any) -> Plugin:
    """A component of five tokens' reach, with its pools built by a function."""

    @hookimpl
    def declare_component() -> ComponentDeclaration:
        return ComponentDeclaration(
            name=name,
            api_version="1.0",
            kind=Kind.PAGED,
            summary="unusual",
            options=Sized,
            capabilities=frozenset({HOST_MIRROR}),
        )

    @hookimpl
    def create_component(options: Sized, context: BuildContext) -> Component:
        return build(options, context)

    marked = {hook: hookimpl(function) for hook, function in hooks.items()}
    return load_plugin(
        name,
        SimpleNamespace(
            declare_component=declare_component, create_component=create_component, **marked
        ),
    )


def of_pages(options: Sized, context: BuildContext) -> Component:
    """Pools of a plane, one slot a page."""
    specs = [PlaneSpec(0, "p", (4,), torch.bfloat16)]
    n_device, n_host = (
        context.pages(tokens) for tokens in (context.device_tokens, context.host_tokens)
    )
    return Component(REACH, DevicePool(specs, n_device), HostMirror(specs, n_host))


def of_planes(*planes: tuple[tuple[int, ...], torch.dtype]) -> Plugin:
    """Planes of any shape and dtype, one layer each."""
    specs = [PlaneSpec(layer, "p", shape, dtype) for layer, (shape, dtype) in enumerate(planes)]

    def build(options: Sized, context: BuildContext) -> Component:
        n_device, n_host = (
            context.pages(tokens) for tokens in (context.device_tokens, context.host_tokens)
        )
        return Component(REACH, DevicePool(specs, n_device), HostMirror(specs, n_host))

    return package("planes", build)


def joined_on_host() -> Plugin:
    """Two planes on DEVICE are one on HOST, so that it builds its copies itself."""
    halves = [PlaneSpec(0, name, (3,), torch.float32) for name in ("left", "right")]
    whole = [PlaneSpec(0, "both", (6,), torch.float32)]

    def build(options: Sized, context: BuildContext) -> Component:
        n_device, n_host = (
            context.pages(tokens) for tokens in (context.device_tokens, context.host_tokens)
        )
        return Component(REACH, DevicePool(halves, n_device), HostMirror(whole, n_host))

    def copies(component: Component, query: TransferQuery) -> list[PlaneCopy]:
        assert component.host is not None
        device_rows, host_rows = slot_index(query.device_slots), slot_index(query.host_slots)
        joined = component.host.plane(0, "both")
        made = []
        for half, name in enumerate(("left", "right")):
            device = component.device.plane(0, name)
            host = joined[:, 3 * half : 3 * half + 3]
            if query.direction is Direction.BACKUP:
                made.append(PlaneCopy(0, device, host, device_rows, host_rows))
            else:
                made.append(PlaneCopy(0, host, device, host_rows, device_rows))
        return made

    def ended(component: Component, query: TransferQuery) -> None:
        del component, query

    return package(
        "joined",
        build,
        build_hicache_transfers=copies,
        commit_hicache_transfers=ended,
        abort_hicache_transfers=ended,
    )


def coarse() -> Plugin:
    """Works with pages of 16 tokens and more, and pools of 20 pages and more."""
    specs = [PlaneSpec(0, "p", (4,), torch.bfloat16)]

    def build(options: Sized, context: BuildContext) -> Component:
        if context.page_size < 16:
            raise ConfigError(f"page_size {context.page_size}: give 16 or more")
        n_device = context.pages(context.device_tokens)
        if n_device < 20:
            raise ConfigError(f"device_tokens: {n_device} pages; give 20 or more")
        return Component(REACH, DevicePool(specs, n_device))

    return package("coarse", build)


def tiny() -> Plugin:
    """As many slots as its option says, for any sizes of the cache."""
    specs = [PlaneSpec(0, "p", (4,), torch.bfloat16)]

    def build(options: Sized, context: BuildContext) -> Component:
        return Component(REACH, DevicePool(specs, options.slots))

    return package("tiny", build)
