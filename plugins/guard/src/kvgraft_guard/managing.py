"""A component's hooks in a pluggy manager of their own, with wrappers around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import pluggy

from kvgraft import hookspecs
from kvgraft.contract import PROJECT
from kvgraft.packages.registry import Plugin

__all__ = ["BOUND_HOOKS", "managed"]

BOUND_HOOKS = (
    hookspecs.finalize_match_result,
    hookspecs.acquire_component_lock,
    hookspecs.release_component_lock,
    hookspecs.build_hicache_transfers,
    hookspecs.commit_hicache_transfers,
    hookspecs.abort_hicache_transfers,
    hookspecs.budget_contribution,
)
"""The specifications of the hooks in the table."""


class _Hooks:
    """Functions as attributes, for pluggy to register."""

    def __init__(self, functions: dict[str, Callable[..., object]]) -> None:
        vars(self).update(functions)


def managed(plugin: Plugin, *wrappers: object) -> pluggy.PluginManager:
    """A component's hooks and wrappers around them, `@hookimpl(wrapper=True)`, in a manager."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    implemented: dict[str, Callable[..., object]] = {}
    for spec in BOUND_HOOKS:
        function = getattr(plugin.implementation, spec.__name__, None)
        if function is not None:
            implemented[spec.__name__] = _marked(spec, function)
    manager.register(_Hooks(implemented), name=plugin.name)
    for wrapper in wrappers:
        manager.register(wrapper)
    manager.check_pending()
    return manager


def _marked(spec: Callable[..., object], function: Callable[..., object]) -> Callable[..., object]:
    """The function, for pluggy: it reads the spec's arguments, an adapter does not show them."""

    @hookspecs.hookimpl
    @wraps(spec)
    def call(*values: object) -> object:
        return function(*values)

    return call
