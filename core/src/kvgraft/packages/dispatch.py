"""The hooks of the loaded components, frozen into a table of plain callables.

pluggy finds and validates; on the hot path a bound call costs a twentieth of a pluggy call. An
entry is None where the component leaves the hook to its reach.

Where somebody wants to look on, such as the guard, the entries go through pluggy after all: each
component's hooks stand in a manager of their own, beside the wrappers around them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import pluggy
from pydantic import BaseModel, ValidationError

from kvgraft import hookspecs
from kvgraft.contract import COPY_ON_WRITE, HOST_MIRROR, PROJECT
from kvgraft.errors import (
    ConfigError,
    ContractViolation,
    KvgraftError,
    PluginError,
    PluginHookError,
)
from kvgraft.packages.hook_results import HOOK_RESULTS, shown
from kvgraft.packages.registry import HOOKS, NO_RULE, Plugin
from kvgraft.pools import BuildContext, Component, DevicePool, HostMirror, PrivatePool
from kvgraft.reach import Reach
from kvgraft.refusals import first_refusal
from kvgraft.tree.component import ComponentShape
from kvgraft.types import Kind, Tier

__all__ = ["Hook", "Mounted", "mount", "parse_options"]

Hook = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Mounted:
    """One component built for one cache, and its hooks with the component bound in.

    A hook that raises comes out as `PluginHookError` with the plugin's name.

    Attributes:
        manager: where its hooks and the wrappers around them are registered, and more wrappers can
            be; None if hooks are called directly.
    """

    plugin: Plugin
    component: Component
    manager: pluggy.PluginManager | None
    finalize_match_result: Hook | None
    acquire_component_lock: Hook | None
    release_component_lock: Hook | None
    build_hicache_transfers: Hook | None
    commit_hicache_transfers: Hook | None
    abort_hicache_transfers: Hook | None
    budget_contribution: Hook | None

    @property
    def name(self) -> str:
        """The component's name."""
        return self.plugin.name

    @property
    def shape(self) -> ComponentShape:
        """The component as the tree sees it."""
        declaration = self.plugin.declaration
        return ComponentShape(
            name=self.name,
            reach=self.component.reach,
            home=declaration.home,
            slots_per_page=self.component.slots_per_page,
            can_copy=COPY_ON_WRITE in declaration.capabilities,
        )


def parse_options(plugin: Plugin, options: dict[str, Any]) -> BaseModel:
    """Options as the plugin's own model (P7).

    Raises:
        PluginError: an unknown or impossible option, with the field named.
    """
    try:
        return plugin.declaration.options.model_validate(options)
    except ValidationError as error:
        said = first_refusal(error, plugin.declaration.options, "option")
        raise PluginError(plugin.name, said, "P7") from error


BOUND_HOOKS = (
    "finalize_match_result",
    "acquire_component_lock",
    "release_component_lock",
    "build_hicache_transfers",
    "commit_hicache_transfers",
    "abort_hicache_transfers",
    "budget_contribution",
)
"""The hooks in the table, in its order."""


class _Hooks:
    """Functions as attributes, for pluggy to register."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        vars(self).update(functions)


def _wrap(plugin: Plugin, wrappers: Sequence[object]) -> pluggy.PluginManager:
    """A component's hooks and wrappers around them, in a manager of their own."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)

    def marked(hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        # An adapter's arguments show in no signature of its own; pluggy reads the spec's.
        @hookspecs.hookimpl
        @wraps(getattr(hookspecs, hook))
        def call(*values: Any) -> Any:
            return function(*values)

        return call

    hooks = {hook: getattr(plugin.implementation, hook, None) for hook in BOUND_HOOKS}
    implemented = {hook: marked(hook, found) for hook, found in hooks.items() if found is not None}
    manager.register(_Hooks(implemented), name=plugin.name)
    for wrapper in wrappers:
        manager.register(wrapper)
    manager.check_pending()
    return manager


def _called(manager: pluggy.PluginManager, hook: str) -> Callable[..., Any]:
    """A hook called through its manager, by position."""
    caller: Callable[..., Any] = getattr(manager.hook, hook)
    first, second = HOOKS[hook]

    def call(component: Component, value: Any) -> Any:
        return caller(**{first: component, second: value})

    return call


def _bind(
    plugin: Plugin, component: Component, hook: str, manager: pluggy.PluginManager | None
) -> Hook | None:
    function = getattr(plugin.implementation, hook, None)
    if function is None:
        return None
    if manager is not None:
        function = _called(manager, hook)
    expected = HOOK_RESULTS.get(hook)
    fits = expected.fits if expected is not None else None

    def call(query: Any) -> Any:
        try:
            answer = function(component, query)
        except ContractViolation:
            raise
        except (Exception, SystemExit) as error:
            raise PluginHookError(plugin.name, hook, error) from error
        if answer is not None and fits is not None and not fits(answer):
            assert expected is not None
            said = f"{hook} returned {shown(answer)}; return {expected.wanted}"
            raise PluginError(plugin.name, said, expected.rule)
        return answer

    return call


def mount(
    plugin: Plugin,
    options: dict[str, Any],
    context: BuildContext,
    wrappers: Sequence[object] = (),
) -> Mounted:
    """Build one component and freeze its hooks.

    Args:
        plugin: the component package.
        options: its options.
        context: page size, device and sizes.
        wrappers: objects with hook wrappers, `@hookimpl(wrapper=True)`, to run around its hooks.

    Raises:
        PluginError: options it refuses, pools that do not fit its declaration, or a failing
            `create_component`.
    """
    parsed = parse_options(plugin, options)
    try:
        component = plugin.implementation.create_component(  # type: ignore[attr-defined]
            options=parsed, context=context
        )
    except ConfigError as error:
        raise PluginError(plugin.name, str(error), NO_RULE) from error
    except KvgraftError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginHookError(plugin.name, "create_component", error) from error
    _check_component(plugin, component)
    manager = _wrap(plugin, wrappers) if wrappers else None
    hooks = (_bind(plugin, component, hook, manager) for hook in BOUND_HOOKS)
    return Mounted(plugin, component, manager, *hooks)


FIELDS: dict[str, type | tuple[type, ...]] = {
    "reach": Reach,
    "device": DevicePool,
    "host": (HostMirror, type(None)),
    "slots_per_page": int,
    "private": tuple,
}
"""Types of what a component holds."""


def _check_fields(plugin: Plugin, component: Component) -> None:
    """Refuse a component whose fields are something else than it says."""
    for field, kind in FIELDS.items():
        held = getattr(component, field)
        if not isinstance(held, kind):
            said = f"create_component returned a Component whose {field} is {shown(held)}"
            raise PluginError(plugin.name, said, NO_RULE)
    pools: tuple[object, ...] = component.private
    for pool in pools:
        if not isinstance(pool, PrivatePool):
            said = f"create_component returned a private pool that is {shown(pool)}"
            raise PluginError(plugin.name, said, NO_RULE)


def _check_component(plugin: Plugin, component: object) -> None:
    declaration = plugin.declaration
    if not isinstance(component, Component):
        said = f"create_component returned {type(component).__name__}, not a Component"
        raise PluginError(plugin.name, said, NO_RULE)
    _check_fields(plugin, component)
    if component.reach.is_state is not (declaration.kind is Kind.STATE):
        raise PluginError(
            plugin.name,
            f"declared kind {declaration.kind.value} but its reach is {component.reach}",
            "P8",
        )
    if component.slots_per_page < 1:
        said = (
            f"slots_per_page is {component.slots_per_page}; it is at least 1: for one slot to hold "
            "more tokens than a page, the page must be larger (context.slots_per_page says so)"
        )
        raise PluginError(plugin.name, said, NO_RULE)
    if component.host is not None and HOST_MIRROR not in declaration.capabilities:
        raise PluginError(
            plugin.name,
            f"has a host mirror without the capability {HOST_MIRROR!r}; declare it",
            "P8",
        )
    if component.private and not hasattr(plugin.implementation, "budget_contribution"):
        raise PluginError(
            plugin.name,
            "has private pools but no budget_contribution; implement it",
            "H7",
        )
    pools = [pool.name for pool in component.private]
    if len({*pools, "device", "host"}) < len(pools) + 2:
        said = f"private pools {pools}: names differ, and none is 'device' or 'host'"
        raise PluginError(plugin.name, said, NO_RULE)
    if declaration.home is Tier.HOST and declaration.kind is Kind.STATE:
        said = "a state component is at home on DEVICE; HOST is for pages"
        raise PluginError(plugin.name, said, NO_RULE)
    if declaration.home is Tier.HOST and component.host is None:
        said = "its home is HOST but there is no host pool; give the cache host_tokens"
        raise PluginError(plugin.name, said, NO_RULE)
