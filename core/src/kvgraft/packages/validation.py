"""Checks a component package's hooks against the contract's names, marks and arguments (P6)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import pluggy

from kvgraft.contract import ApiVersion, Contract
from kvgraft.errors import PluginError

__all__ = ["implemented_hooks"]

MARKS = {
    "wrapper": "only observers wrap hooks, see docs/guard.md",
    "hookwrapper": "only observers wrap hooks, see docs/guard.md",
    "optionalhook": "a hook that the core does not know would never run",
    "specname": "give the function the hook's name",
}
"""Options of `hookimpl` that are not for components, and why."""

SUSPENDED: tuple[Callable[[Any], bool], ...] = (
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
    inspect.isgeneratorfunction,
)
"""Functions that answer later."""


def implemented_hooks(
    name: str,
    implementation: object,
    manager: pluggy.PluginManager,
    contract: Contract,
    written_for: ApiVersion,
) -> set[str]:
    """The hooks marked with `hookimpl`; every marked function must be a hook.

    Args:
        name: the component, for messages.
        implementation: a module, or any object, with the hooks.
        manager: reads the marks.
        contract: the contract that the core keeps.
        written_for: the version of it that the component was written for.

    Raises:
        PluginError: a hook that is misspelt, unmarked, marked as something else, or has other
            arguments than in that version.
    """
    implemented = _marked(name, implementation, manager, contract)
    for hook, spec in contract.hooks.items():
        function = getattr(implementation, hook, None)
        if spec.since > written_for:
            if hook in implemented:
                raise PluginError(
                    name,
                    f"{hook} is there since API {spec.since}, this component is written for API "
                    f"{written_for}; declare {spec.since}",
                )
            # A function of its own that happens to have the name of a later hook.
            continue
        if function is not None and hook not in implemented:
            raise PluginError(name, f"{hook} is not marked with @hookimpl, so it would never run")
        if hook in implemented:
            _check_arguments(name, hook, function, spec.arguments_for(written_for))
    return implemented


def _marked(
    name: str, implementation: object, manager: pluggy.PluginManager, contract: Contract
) -> set[str]:
    hooks = set()
    for attribute in dir(implementation):
        marked = manager.parse_hookimpl_opts(implementation, attribute)
        if marked is None:
            continue
        for option, why in MARKS.items():
            if marked.get(option):
                raise PluginError(name, f"{attribute} is marked @hookimpl({option}=...); {why}")
        if attribute not in contract.hooks:
            close = get_close_matches(attribute, contract.hooks, n=1)
            known = ", ".join(contract.hooks)
            advice = f"did you mean {close[0]}?" if close else f"hooks are {known}"
            raise PluginError(name, f"{attribute} is no hook; {advice}")
        hooks.add(attribute)
    return hooks


def _check_arguments(name: str, hook: str, function: Any, wanted: tuple[str, ...]) -> None:
    """Refuse a hook that cannot be called with these arguments in this order."""
    if any(suspended(function) for suspended in SUSPENDED):
        said = f"{hook} is a coroutine or a generator; a hook is called and answers at once"
        raise PluginError(name, said)
    taken = inspect.signature(function).parameters
    given = tuple(taken)
    by_position = all(each.kind is each.POSITIONAL_OR_KEYWORD for each in taken.values())
    if given != wanted or not by_position:
        written = ", ".join(_written(taken))
        raise PluginError(name, f"{hook} takes ({written}); it must take ({', '.join(wanted)})")


def _written(taken: Any) -> list[str]:
    """Arguments as a signature has them, with marks for keyword-only and variadic ones."""
    words: list[str] = []
    for name, each in taken.items():
        if each.kind is each.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        words.append(f"{stars}{name}")
        if each.kind is each.POSITIONAL_ONLY:
            words = [word for word in words if word != "/"] + ["/"]
    return words
