"""The contract's versions, the hooks of each, and the capabilities a component may declare.

A core supports its own version of the contract and every older one of the same major version.
Additions of a minor version are marked, so that a component is checked against the version it was
written for:

    @hookspec(firstresult=True)
    @since("1.1")                   # the hook
    @since("1.2", "deadline")       # an argument it gained later
    def weigh_request(component, query, deadline): ...

Everything unmarked exists since the major version. `docs/versioning.md` has the rules.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from kvgraft.errors import PluginError

__all__ = [
    "API_VERSION",
    "CAPABILITIES",
    "COPY_ON_WRITE",
    "ENTRY_POINT_GROUP",
    "HOST_MIRROR",
    "PROJECT",
    "ApiVersion",
    "Contract",
    "HookSpec",
    "check_api_version",
    "since",
]

PROJECT = "kvgraft"
"""The pluggy project name."""

ENTRY_POINT_GROUP = "kvgraft.components"
"""Entry points of this group are component packages."""

API_VERSION = "1.1"
"""The contract version this core implements. A component written for the same major version and
an equal or older minor version works."""

HOST_MIRROR = "host_mirror"
COPY_ON_WRITE = "copy_on_write"
CAPABILITIES: Mapping[str, str] = {HOST_MIRROR: "1.0", COPY_ON_WRITE: "1.0"}
"""Capabilities that a component may declare (P8), and the version that added each."""

_F = TypeVar("_F", bound=Callable[..., Any])
_SINCE = f"{PROJECT}_since"


class ApiVersion(NamedTuple):
    """A version of the contract; versions compare in order.

    Attributes:
        major: components written for another one are refused.
        minor: grows with every addition.
    """

    major: int
    minor: int

    @classmethod
    def parse(cls, text: object) -> ApiVersion:
        """`"1.0"` as a version.

        Raises:
            ValueError: not MAJOR.MINOR in plain digits.
        """
        found = isinstance(text, str) and re.fullmatch(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)", text)
        if not found:
            raise ValueError(f"{text!r} is not MAJOR.MINOR")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class HookSpec:
    """One hook, as a contract knows it.

    Attributes:
        name: the hook's.
        since: the version that added it.
        arguments: their names in order, and the version that added each.
    """

    name: str
    since: ApiVersion
    arguments: Mapping[str, ApiVersion]

    def arguments_for(self, version: ApiVersion) -> tuple[str, ...]:
        """The arguments that a component written for `version` takes."""
        return tuple(name for name, added in self.arguments.items() if added <= version)


@dataclass(frozen=True, slots=True)
class Contract:
    """A version of the contract and the hooks that belong to it.

    Attributes:
        version: the newest version a component may be written for.
        specs: the module or class with the marked hook functions, for pluggy.
        hooks: by name.
        required: hooks every component implements, as far as its version has them.
        inverses: hooks that come in pairs: an implementation of the first needs the second.
        capabilities: the capabilities that may be declared, with the version that added each.
    """

    version: ApiVersion
    specs: Any
    hooks: Mapping[str, HookSpec]
    required: tuple[str, ...]
    inverses: tuple[tuple[str, str], ...]
    capabilities: Mapping[str, ApiVersion]

    @classmethod
    def read(
        cls,
        specs: Any,
        version: str = API_VERSION,
        capabilities: Mapping[str, str] = CAPABILITIES,
    ) -> Contract:
        """The contract that a module of hook specs defines.

        Args:
            specs: functions marked with `hookspec`, `REQUIRED` and `INVERSES`.
            version: the version they stand for.
            capabilities: name to the version that added it.

        Raises:
            ValueError: an invalid version, or a mark on an argument that does not exist.
        """
        newest = ApiVersion.parse(version)
        return cls(
            version=newest,
            specs=specs,
            hooks={
                name: _read_hook(name, function, ApiVersion(newest.major, 0))
                for name, function in vars(specs).items()
                if inspect.isfunction(function) and hasattr(function, f"{PROJECT}_spec")
            },
            required=specs.REQUIRED,
            inverses=specs.INVERSES,
            capabilities={name: ApiVersion.parse(text) for name, text in capabilities.items()},
        )


def since(version: str, *arguments: str) -> Callable[[_F], _F]:
    """Mark a hook spec, or only the arguments named, as added by a version of the contract."""
    added = ApiVersion.parse(version)

    def mark(function: _F) -> _F:
        marks = vars(function).setdefault(_SINCE, {})
        marks.update(dict.fromkeys(arguments or (None,), added))
        return function

    return mark


def _read_hook(name: str, function: Callable[..., Any], first: ApiVersion) -> HookSpec:
    """A marked function as a hook; without a version mark it exists since `first`."""
    marks: dict[str | None, ApiVersion] = vars(function).get(_SINCE, {})
    arguments = tuple(inspect.signature(function).parameters)
    unknown = marks.keys() - {None, *arguments}
    if unknown:
        raise ValueError(f"{name} takes {arguments}, there is no {sorted(map(str, unknown))}")
    added = marks.get(None, first)
    return HookSpec(
        name=name,
        since=added,
        arguments={each: marks.get(each, added) for each in arguments},
    )


def check_api_version(plugin: str, version: str, core: str = API_VERSION) -> ApiVersion:
    """The version a component was written for, if this core supports it (P3).

    Args:
        plugin: the component, for the message.
        version: the version that it declares.
        core: the version of the core.

    Raises:
        PluginError: with both versions.
    """
    try:
        written_for = ApiVersion.parse(version)
    except ValueError as error:
        raise PluginError(
            plugin, f"API version {error}; write a literal such as '{API_VERSION}'", "P3"
        ) from None
    kept = ApiVersion.parse(core)
    if written_for.major != kept.major or written_for > kept:
        raise PluginError(
            plugin,
            f"written for API {version}, this core has API {core}; "
            f"install a kvgraft with API {version} or a matching component",
            "P3",
        )
    return written_for
