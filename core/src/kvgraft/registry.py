"""Finding component packages and refusing those that cannot keep the contract (P1 to P7).

Entry points are read with importlib-metadata, each is imported on its own so that a broken package
takes nothing else down, and pluggy validates what it implements. What pluggy lets through is
checked here: overrides without `hookimpl`, missing arguments, missing hooks, two distributions
under one name.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import importlib_metadata
import pluggy
from pydantic import BaseModel

from kvgraft import hookspecs
from kvgraft.contract import CAPABILITIES, ENTRY_POINT_GROUP, PROJECT, check_api_version
from kvgraft.errors import ConfigError, PluginError
from kvgraft.types import ComponentDeclaration

__all__ = ["Found", "Plugin", "discover", "load_plugin", "select"]

HOOKS = {
    name: tuple(inspect.signature(function).parameters)
    for name, function in vars(hookspecs).items()
    if inspect.isfunction(function) and hasattr(function, f"{PROJECT}_spec")
}
"""Argument names of every hook."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """A component package that passed every check.

    Attributes:
        name: the component's name.
        declaration: what it declares.
        implementation: the object carrying its hooks.
        distribution, version: where it comes from; empty for one passed in directly.
    """

    name: str
    declaration: ComponentDeclaration
    implementation: object
    distribution: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class Found:
    """An entry point and what came of it: a plugin, or the reason why not."""

    name: str
    distribution: str
    version: str
    plugin: Plugin | None
    problem: str | None

    @property
    def status(self) -> str:
        """`"ok"`, or why it cannot be used."""
        return self.problem or "ok"


def load_plugin(
    name: str, implementation: object, distribution: str = "", version: str = ""
) -> Plugin:
    """Check one component package.

    Raises:
        PluginError: a hook that is missing, misspelt, unmarked or has other arguments, another
            API version, or a declaration that does not fit the name.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(implementation, name=name)
        manager.check_pending()
    except (pluggy.PluginValidationError, ValueError) as error:
        raise PluginError(name, f"{' '.join(str(error).split())}; see kvgraft.hookspecs") from error
    implemented = {
        caller.name for caller in manager.get_hookcallers(implementation) or () if caller.spec
    }
    _check_hooks(name, implementation, implemented)
    try:
        declaration = implementation.declare_component()  # type: ignore[attr-defined]
    except Exception as error:
        raise PluginError(
            name, f"hook declare_component raised {type(error).__name__}: {error}"
        ) from error
    _check_declaration(name, declaration)
    return Plugin(name, declaration, implementation, distribution, version)


def _check_hooks(name: str, implementation: object, implemented: set[str]) -> None:
    for hook, arguments in HOOKS.items():
        function = getattr(implementation, hook, None)
        if function is not None and hook not in implemented:
            raise PluginError(name, f"{hook} is not marked with @hookimpl, so it would never run")
        if hook not in implemented:
            continue
        if function is None:
            raise PluginError(name, f"{hook} is implemented under another name; call it {hook}")
        given = tuple(inspect.signature(function).parameters)  # type: ignore[arg-type]
        if given != arguments:
            raise PluginError(
                name, f"{hook} takes ({', '.join(given)}); it must take ({', '.join(arguments)})"
            )
    for hook in hookspecs.REQUIRED:
        if hook not in implemented:
            raise PluginError(name, f"{hook} is missing; every component implements it")
    for hook, inverse in hookspecs.INVERSES:
        if hook in implemented and inverse not in implemented:
            raise PluginError(name, f"{hook} is implemented without its inverse {inverse}")


def _check_declaration(name: str, declaration: object) -> None:
    if not isinstance(declaration, ComponentDeclaration):
        raise PluginError(
            name,
            f"declare_component returned {type(declaration).__name__}, not a ComponentDeclaration",
        )
    check_api_version(name, declaration.api_version)
    if declaration.name != name:
        raise PluginError(
            name, f"declares the name {declaration.name!r}; entry point and name must agree"
        )
    unknown = declaration.capabilities - CAPABILITIES
    if unknown:
        raise PluginError(
            name, f"unknown capabilities {sorted(unknown)}; known are {sorted(CAPABILITIES)}"
        )
    options: object = declaration.options
    if not (isinstance(options, type) and issubclass(options, BaseModel)):
        raise PluginError(name, f"options must be a pydantic model, not {options!r}")
    if options.model_config.get("extra") != "forbid":
        raise PluginError(name, f"{options.__name__} must forbid unknown fields: extra='forbid'")


def discover() -> list[Found]:
    """Every installed component package, by name; problems are reported, not raised (P5)."""
    points: dict[str, list[importlib_metadata.EntryPoint]] = {}
    for point in importlib_metadata.entry_points(group=ENTRY_POINT_GROUP):
        same = points.setdefault(point.name, [])
        if not any(_distribution(point) == _distribution(other) for other in same):
            same.append(point)
    return [_find(name, points[name]) for name in sorted(points)]


def _distribution(point: importlib_metadata.EntryPoint) -> tuple[str, str]:
    dist = point.dist
    return (dist.name, dist.version) if dist is not None else ("", "")


def _find(name: str, points: Sequence[importlib_metadata.EntryPoint]) -> Found:
    distribution, version = _distribution(points[0])
    if len(points) > 1:
        owners = " and ".join(_distribution(point)[0] for point in points)
        problem = f"published by {owners}; uninstall all but one"
        return Found(name, distribution, version, None, problem)
    try:
        implementation = points[0].load()
        plugin = load_plugin(name, implementation, distribution, version)
    except PluginError as error:
        return Found(name, distribution, version, None, str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised by a plugin, reported (P5)
        problem = f"import failed: {type(error).__name__}: {error}"
        return Found(name, distribution, version, None, problem)
    return Found(name, distribution, version, plugin, None)


def select(names: Sequence[str]) -> list[Plugin]:
    """The named components, ready to be built.

    Raises:
        ConfigError: a component that is not installed.
        PluginError: one that is installed but cannot be used (P5).
    """
    if not names:
        return []
    found = {entry.name: entry for entry in discover()}
    plugins = []
    for name in names:
        entry = found.get(name)
        if entry is None:
            known = ", ".join(sorted(found)) or "none"
            raise ConfigError(
                f"component {name!r} is not installed; installed: {known}; see `kvgraft components`"
            )
        if entry.plugin is None:
            raise PluginError(name, entry.problem or "cannot be used")
        plugins.append(entry.plugin)
    return plugins
