"""A contract 1.2 that does not exist: today's with every change a minor version may make.

Module and values stand for a later core's `hookspecs` and `contract`:

- `acquire_component_lock` gained the argument `tenant`
- `describe_component` is new, with an inverse and required of components written for 1.2
- a hook's query gained a field
- the capability `storage` is new
"""

from __future__ import annotations

import dataclasses
from collections import namedtuple
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kvgraft import (
    BuildContext,
    Component,
    ComponentDeclaration,
    ComponentOptions,
    DevicePool,
    Everything,
    Kind,
    LockQuery,
    PlaneSpec,
    Reach,
    Span,
    hookimpl,
    hookspecs,
)
from kvgraft.contract import CAPABILITIES, Contract, since
from kvgraft.hookspecs import hookspec
from kvgraft.packages.registry import Plugin

__all__ = ["FUTURE", "Newer", "as_called_by_1_1", "with_longer_queries"]


@hookspec(firstresult=True)
@since("1.2", "tenant")
def _acquire_component_lock(
    component: Component, query: LockQuery, tenant: str
) -> Sequence[Span] | None:
    """Now says for whom."""


@hookspec(firstresult=True)
@since("1.2")
def _describe_component(component: Component) -> str | None:
    """One line for a report."""


@hookspec(firstresult=True)
@since("1.2")
def _forget_description(component: Component) -> None:
    """Undo it."""


SPECS = SimpleNamespace(
    **{
        name: value
        for name, value in vars(hookspecs).items()
        if not name.startswith("_") and name != "INVERSES"
    }
    | {
        "acquire_component_lock": _acquire_component_lock,
        "describe_component": _describe_component,
        "forget_description": _forget_description,
        "REQUIRED": (*hookspecs.REQUIRED, "describe_component"),
        "INVERSES": (*hookspecs.INVERSES, ("describe_component", "forget_description")),
    }
)

FUTURE = Contract.read(SPECS, "1.2", {**CAPABILITIES, "storage": "1.2"})


class Newer:
    """A component written for 1.2.

    Attributes:
        tenants: for whom `acquire_component_lock` was asked.
    """

    def __init__(self) -> None:
        self.tenants: list[str] = []

    @hookimpl
    def declare_component(self) -> ComponentDeclaration:
        return ComponentDeclaration(
            name="newer",
            api_version="1.2",
            kind=Kind.PAGED,
            summary="written for 1.2",
            options=ComponentOptions,
            capabilities=frozenset({"storage"}),
        )

    @hookimpl
    def create_component(self, options: ComponentOptions, context: BuildContext) -> Component:
        import torch

        planes = [PlaneSpec(0, "kv", (context.page_size,), torch.uint8)]
        return Component(
            Reach(Everything()), DevicePool(planes, context.pages(context.device_tokens))
        )

    @hookimpl
    def acquire_component_lock(
        self, component: Component, query: LockQuery, tenant: str
    ) -> Sequence[Span]:
        self.tenants.append(tenant)
        return [Span(0, query.boundary)] if query.boundary else []

    @hookimpl
    def release_component_lock(self, component: Component, segment: Sequence[Span]) -> None:
        """Nothing to undo."""

    @hookimpl
    def describe_component(self, component: Component) -> str:
        return "a newer one"

    @hookimpl
    def forget_description(self, component: Component) -> None:
        """Nothing to undo."""


def longer(query: Any) -> Any:
    """A hook's query, with a field that did not exist when the hook was written."""
    make: Callable[..., Any] = namedtuple
    return make(type(query).__name__, (*query._fields, "added"))(*query, "later")


def with_longer_queries(plugin: Plugin) -> Plugin:
    """The plugin, given queries that have grown a field."""
    hooks: dict[str, Callable[..., Any]] = dict(vars(plugin.implementation))
    for name in hooks.keys() - {"declare_component", "create_component", "release_component_lock"}:
        hooks[name] = _asking_longer(hooks[name])
    return dataclasses.replace(plugin, implementation=SimpleNamespace(**hooks))


def _asking_longer(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(component: Component, query: Any, *more: Any) -> Any:
        return hook(component, longer(query), *more)

    return call


def as_called_by_1_1(plugin: Plugin) -> Plugin:
    """A plugin loaded for 1.2, with its hooks called as a core of 1.2 would.

    The core under test makes the calls of 1.1, so this translates: a tenant is passed, the queries
    are longer.
    """
    hooks = dict(vars(with_longer_queries(plugin).implementation))
    acquire = hooks.pop("acquire_component_lock", None)
    if acquire is not None:
        hooks["acquire_component_lock"] = lambda component, query: acquire(
            component, query, "tenant 7"
        )
    return dataclasses.replace(plugin, implementation=SimpleNamespace(**hooks))
