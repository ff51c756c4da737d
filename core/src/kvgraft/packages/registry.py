"""Finding component packages and refusing those that cannot keep the contract (P1 to P7).

Each entry point is imported on its own, so that a broken package affects no other, and its hooks
are checked: names, marks, arguments, hooks that come in pairs, one distribution for one name.
pluggy validates last. Eviction policies are found by their names, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import pluggy
from pydantic import BaseModel

from kvgraft import hookspecs
from kvgraft.config import DENSITY, LRU
from kvgraft.contract import (
    ENTRY_POINT_GROUP,
    PROJECT,
    ApiVersion,
    Contract,
    check_api_version,
)
from kvgraft.errors import ConfigError, PluginError
from kvgraft.optional import Published, import_failure, is_installed, load_part, published
from kvgraft.policies.policy import EvictionPolicy
from kvgraft.policies.recency import LeastRecentlyUsed
from kvgraft.refusals import closest, of_type
from kvgraft.types import ComponentDeclaration

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
            # Its own function, which happens to have the name of a later hook.
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
            core's contract, even if it was written for an older version.
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

    Args:
        name: the component's name.
        implementation: a module, or any object, with the hooks.
        distribution: where it comes from.
        version: the distribution's version.
        contract: the core's contract.

    Raises:
        PluginError: a hook that is missing, misspelt, unmarked or has other arguments, another
            API version, or a declaration that does not fit the name.
    """
    # Its version first: a hook of a later version would look misspelt below.
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
    hooks: dict[str, Callable[..., Any]] = {}
    for hook in sorted(implemented):
        spec = contract.hooks[hook]
        takes = spec.arguments_for(written_for)
        hooks[hook] = _taking(getattr(implementation, hook), tuple(spec.arguments), takes)
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
        return contract.hooks[hook].since <= written_for and hook not in hooks

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
    said = f"component {name!r} is not installed;{closest(name, known)} installed: {names}"
    return ConfigError(f"{said}; in a clone of kvgraft, pip install ./plugins/NAME brings its own")


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


POLICY_GROUP = "kvgraft.policies"
"""Entry point group of packages with policies: a class, or a function, without arguments."""


def policy_names() -> list[str]:
    """Names of the policies that are installed."""
    ours = {LRU, DENSITY} if is_installed(DENSITY) else {LRU}
    return sorted(ours | {each.name for each in published(POLICY_GROUP)} - {LRU, DENSITY})


def load_policy(name: str) -> EvictionPolicy:
    """A new policy.

    Raises:
        ConfigError: no package has one of this name, or its package cannot be used.
    """
    if name == LRU:
        return LeastRecentlyUsed()
    if name == DENSITY:
        policy: EvictionPolicy = load_part(DENSITY)()
        return policy
    for each in published(POLICY_GROUP):
        if each.name == name:
            if each.contested is not None:
                raise ConfigError(f"eviction policy {name!r}: {each.contested}")
            return _published(name, each.load)
    known = policy_names()
    said = f"eviction policy {name!r} is not installed;{closest(name, {*known, DENSITY})}"
    raise ConfigError(f"{said} use one of {', '.join(known)}, or install its package")


def _published(name: str, load: Callable[[], object]) -> EvictionPolicy:
    """A package's policy. The package's code may raise anything, and is named then (P5)."""
    try:
        make = load()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"eviction policy {name!r}: {import_failure(error)}") from error
    if not callable(make):
        raise ConfigError(
            f"eviction policy {name!r}: its entry point is {of_type(make)}; publish a "
            "class, or a function without arguments"
        )
    try:
        policy = make()
    except (Exception, SystemExit) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"eviction policy {name!r} cannot be made: {reason}") from error
    missing = missing_members(policy)
    if missing:
        raise ConfigError(
            f"eviction policy {name!r}: {of_type(policy)} has no {', '.join(missing)}; "
            "implement kvgraft.policies.EvictionPolicy"
        )
    made: EvictionPolicy = policy
    if made.name != name:
        raise ConfigError(
            f"eviction policy {name!r}: its `name` is {made.name!r:.40}; entry point and name must "
            "agree"
        )
    return made


def missing_members(policy: object) -> list[str]:
    """Names of `EvictionPolicy` that an object does not have."""
    return [each for each in MEMBERS if not hasattr(policy, each)]


MEMBERS = ("name", "classifies", "order", "opened", "classify", "admitted", "finished", "describe")
