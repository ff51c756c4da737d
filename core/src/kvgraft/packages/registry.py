"""Finding component packages and refusing those that cannot keep the contract (P1 to P7).

Each entry point is imported on its own so that a broken package
takes nothing else down, and its hooks are held to the contract: names, marks, arguments,
hooks that come in pairs, one distribution for one name. pluggy has the last word.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import pluggy
from pydantic import BaseModel

from kvgraft import hookspecs
from kvgraft.contract import (
    ENTRY_POINT_GROUP,
    PROJECT,
    ApiVersion,
    Contract,
    check_api_version,
)
from kvgraft.entry_points import Published, import_failure, published
from kvgraft.errors import ConfigError, PluginError
from kvgraft.packages.validation import implemented_hooks
from kvgraft.types import ComponentDeclaration

__all__ = [
    "CURRENT",
    "HOOKS",
    "NO_RULE",
    "Found",
    "Plugin",
    "discover",
    "expect_installed",
    "load_plugin",
    "select",
]

CURRENT = Contract.read(hookspecs)
"""The contract of this core."""

HOOKS = {name: tuple(spec.arguments) for name, spec in CURRENT.hooks.items()}
"""Argument names of every hook."""

NO_RULE = ""
"""The rule of a `PluginError` about something no rule of the contract speaks of."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A component package that passed every check.

    Attributes:
        name: the component's name.
        declaration: its result of `declare_component`.
        implementation: its hooks and nothing else, by the names and with the arguments of the
            contract it was loaded for, whichever older version it was written for.
        distribution, version: where it comes from; empty for one passed in directly.
    """

    name: str
    declaration: ComponentDeclaration
    implementation: object
    distribution: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """An entry point and its outcome: a plugin, or the reason for refusing it."""

    name: str
    distribution: str
    version: str
    plugin: Plugin | None
    error: PluginError | None

    @property
    def problem(self) -> str | None:
        """Why it cannot be used; None if it can."""
        return None if self.error is None else self.error.reason

    @property
    def status(self) -> str:
        """`"ok"`, or why it cannot be used."""
        return self.problem or "ok"


def load_plugin(
    name: str,
    implementation: object,
    distribution: str = "",
    version: str = "",
    contract: Contract = CURRENT,
) -> Plugin:
    """Check one component package against the version of the contract it was written for.

    Warns with `DeprecationWarning` about hooks that the next major version takes away.

    Args:
        name: the component's name.
        implementation: a module, or any object, with the hooks.
        distribution: where it comes from.
        version: the distribution's version.
        contract: the contract that the core keeps.

    Raises:
        PluginError: a hook that is missing, misspelt, unmarked or has other arguments, another
            API version, or a declaration that does not fit the name.
    """
    # Its version first: a newer hook than this core's would be taken for a misspelt hook below.
    declaration = _declare(name, implementation)
    written_for = _check_declaration(name, declaration, contract)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(contract.specs)
    implemented = implemented_hooks(name, implementation, manager, contract, written_for)
    try:
        manager.register(implementation, name=name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(name, f"{' '.join(str(error).split())}; see kvgraft.hookspecs") from error
    hooks = _hooks_today(name, implementation, implemented, contract, written_for)
    _check_complete(name, hooks.keys(), contract, written_for)
    return Plugin(name, declaration, SimpleNamespace(**hooks), distribution, version)


def _declare(name: str, implementation: object) -> ComponentDeclaration:
    hook = "declare_component"
    function = getattr(implementation, hook, None)
    if function is None:
        raise PluginError(name, f"{hook} is missing; every component implements it")
    if not hasattr(function, f"{PROJECT}_impl"):
        raise PluginError(name, f"{hook} is not marked with @hookimpl, so it would never run")
    try:
        declaration = function()
    except (Exception, SystemExit) as error:
        said = f"hook {hook} raised {type(error).__name__}: {error}"
        raise PluginError(name, said, NO_RULE) from error
    if not isinstance(declaration, ComponentDeclaration):
        said = f"{hook} returned {type(declaration).__name__}, not a ComponentDeclaration"
        raise PluginError(name, said, NO_RULE)
    return declaration


def _hooks_today(
    name: str,
    implementation: object,
    implemented: set[str],
    contract: Contract,
    written_for: ApiVersion,
) -> dict[str, Callable[..., Any]]:
    """A component's hooks as this contract calls them."""
    hooks: dict[str, Callable[..., Any]] = {}
    for hook in sorted(implemented):
        spec = contract.hooks[hook]
        function = getattr(implementation, hook)
        takes = spec.arguments_for(written_for)
        hooks[hook] = _taking(function, tuple(spec.arguments), takes)
        if spec.deprecation is None:
            continue
        successor = spec.deprecation.renamed_to
        if successor in implemented:
            raise PluginError(name, f"implements {hook} and {successor}; keep {successor}")
        if successor is not None:
            hooks[successor] = _taking(function, tuple(contract.hooks[successor].arguments), takes)
        warnings.warn(
            f"component {name!r}: hook {hook} goes away in API {spec.deprecation.removal}; "
            f"{spec.deprecation.advice}",
            DeprecationWarning,
            stacklevel=3,
        )
    return hooks


def _taking(
    function: Callable[..., Any], given: tuple[str, ...], takes: tuple[str, ...]
) -> Callable[..., Any]:
    """A function that is called with all of `given` and passes on those that the hook `takes`."""
    if given == takes:
        return function

    def call(*positional: object, **named: object) -> object:
        return function(
            *(value for argument, value in zip(given, positional) if argument in takes),
            **{argument: value for argument, value in named.items() if argument in takes},
        )

    return call


def _check_complete(
    name: str, hooks: Collection[str], contract: Contract, written_for: ApiVersion
) -> None:
    """Hooks that every component has, and those that come in pairs, as of its version."""

    def lacks(hook: str) -> bool:
        spec = contract.hooks[hook]
        renamed = spec.deprecation is not None and spec.deprecation.renamed_to in hooks
        return spec.since <= written_for and hook not in hooks and not renamed

    for hook in contract.required:
        if lacks(hook):
            raise PluginError(name, f"{hook} is missing; every component implements it")
    for hook, inverse in contract.inverses:
        if hook in hooks and lacks(inverse):
            raise PluginError(name, f"{hook} is implemented without its inverse {inverse}")
        if inverse in hooks and lacks(hook):
            raise PluginError(name, f"{inverse} is implemented without {hook}, which it undoes")


def _check_declaration(
    name: str, declaration: ComponentDeclaration, contract: Contract
) -> ApiVersion:
    """The version it is written for, if this contract can be kept with it."""
    written_for = check_api_version(name, declaration.api_version, str(contract.version))
    if declaration.name != name:
        raise PluginError(
            name, f"declares the name {declaration.name!r}; entry point and name must agree", "P1"
        )
    known = {each for each, added in contract.capabilities.items() if added <= written_for}
    unknown = declaration.capabilities - known
    if unknown:
        newer = unknown & contract.capabilities.keys()
        advice = f"; {sorted(newer)} came after API {written_for}, declare a newer one"
        raise PluginError(
            name,
            f"unknown capabilities {sorted(unknown)}; known are {sorted(known)}"
            + (advice if newer else ""),
            "P8",
        )
    options: object = declaration.options
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise PluginError(name, f"options must be a pydantic model, not {options!r}", "P7")
    if options.model_config.get("extra") != "forbid":
        raise PluginError(
            name, f"{options.__name__} must forbid unknown fields: extra='forbid'", "P7"
        )
    return written_for


def discover(contract: Contract = CURRENT) -> list[Found]:
    """Every installed component package, by name; problems are reported, not raised (P5)."""
    return [_find(each, contract) for each in published(ENTRY_POINT_GROUP)]


def _find(each: Published, contract: Contract) -> Found:
    name, distribution, version = each.name, each.distribution, each.version
    plugin, error = None, None
    if each.contested is not None:
        return Found(name, distribution, version, None, PluginError(name, each.contested, "P4"))
    try:
        plugin = load_plugin(name, each.load(), distribution, version, contract)
    except PluginError as refused:
        error = refused
    except DeprecationWarning as warning:  # where warnings are errors
        error = PluginError(name, str(warning).removeprefix(f"component {name!r}: "), NO_RULE)
    except (Exception, SystemExit) as raised:  # noqa: BLE001 - raised by a plugin, reported (P5)
        error = PluginError(name, import_failure(raised), NO_RULE)
    return Found(name, distribution, version, plugin, error)


def expect_installed(name: str) -> None:
    """Refuse a name that no installed package publishes; nothing is loaded.

    Raises:
        ConfigError: the component is not installed.
    """
    known = {each.name for each in published(ENTRY_POINT_GROUP)}
    if name not in known:
        raise _not_installed(name, known)


def _not_installed(name: str, known: Collection[str]) -> ConfigError:
    names = ", ".join(sorted(known)) or "none"
    near = get_close_matches(name, known, n=1)
    meant = f" did you mean {near[0]!r}?" if near else ""
    return ConfigError(
        f"component {name!r} is not installed;{meant} installed: {names}; see `kvgraft components`"
    )


def select(names: Sequence[str]) -> list[Plugin]:
    """The named components, ready to be built; no other package is imported.

    Raises:
        ConfigError: a component that is not installed.
        PluginError: one that is installed but cannot be used (P5).
    """
    if not names:
        return []
    points = {each.name: each for each in published(ENTRY_POINT_GROUP)}
    plugins = []
    for name in names:
        if name not in points:
            raise _not_installed(name, points)
        entry = _find(points[name], CURRENT)
        if entry.error is not None:
            raise entry.error
        assert entry.plugin is not None
        plugins.append(entry.plugin)
    return plugins
