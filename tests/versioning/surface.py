"""The names of the core that a component sees, as plain data to record and compare.

`python -m tests.versioning.surface` prints it. It has two parts: the contract (hooks, arguments,
capabilities), which names the version of each part, and the shapes (values that cross a hook,
classes that pools are built of), where additions show only by comparing.
"""

from __future__ import annotations

import enum
import inspect
import json
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import kvgraft
import kvgraft.pools
import kvgraft.transfers
from kvgraft.contract import ApiVersion, Contract
from kvgraft.packages.registry import CURRENT

__all__ = [
    "FROZEN",
    "READABLE",
    "Surface",
    "breaks",
    "changes",
    "parameters",
    "recorded",
    "surface",
]

FROZEN = Path(__file__).parent / "frozen"
"""One directory for each version of the contract; none is edited once its version is released."""

CROSSING = (
    *("ComponentDeclaration", "ComponentMatch", "Demand", "DemandQuery", "Direction", "Kind"),
    *("LockQuery", "MatchView", "Span", "Tier", "TransferQuery"),
)
"""Queries and answers of hooks."""

BLOCKS = (
    *("AttentionOptions", "ComponentOptions", "LayerOptions", "Dtype", "Reach"),
    *("Chunk", "ChunkedLocal", "Everything", "Leading", "StateAt", "Term", "Trailing"),
    *("BudgetError", "ConfigError", "ContractViolation", "IntegrityError"),
    *("COPY_ON_WRITE", "HOST_MIRROR", "hookimpl"),
)
"""Names that components are written with."""

COPIES = ("PlaneCopy", "pair_planes")
"""Names for components that move their data themselves."""

READABLE = (property, types.MemberDescriptorType)
"""Attributes that a class offers: a slot is read as a property is."""

STARS = {"KEYWORD_ONLY": "*, ", "VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}

Surface = dict[str, Any]


def surface(contract: Contract = CURRENT, version: str | None = None) -> Surface:
    """The surface for components of `version`; by default the contract's own."""
    seen_by = contract.version if version is None else ApiVersion.parse(version)
    return {
        "api": str(seen_by),
        "contract": _contract(contract, seen_by),
        "shapes": {
            f"{module.__name__}.{name}": _shape(getattr(module, name))
            for module, names in (
                (kvgraft, (*CROSSING, *BLOCKS)),
                (kvgraft.pools, kvgraft.pools.__all__),
                (kvgraft.transfers, COPIES),
            )
            for name in sorted(names)
        },
    }


def recorded(version: str) -> Surface:
    """The surface as it was when a version was made."""
    text = (FROZEN / version / "surface.json").read_text(encoding="utf-8")
    loaded: Surface = json.loads(text)
    return loaded


def changes(old: Surface, new: Surface) -> list[str]:
    """Every difference, one line each."""
    return list(_differences("", old, new))


def breaks(old: Surface, new: Surface) -> list[str]:
    """Differences that a component written against `old` can notice; one line each.

    Args:
        old: recorded for some version.
        new: the surface that a component of that version sees today.
    """
    found = list(_differences("", old["contract"], new["contract"]))
    for name, shape in old["shapes"].items():
        if name not in new["shapes"]:
            found.append(f"{name} is gone")
        else:
            found += _broken(name, shape, new["shapes"][name])
    return found


def _contract(contract: Contract, version: ApiVersion) -> Surface:
    hooks = {name: spec for name, spec in contract.hooks.items() if spec.since <= version}
    return {
        "hooks": {name: list(spec.arguments_for(version)) for name, spec in sorted(hooks.items())},
        "required": sorted(hook for hook in contract.required if hook in hooks),
        "inverses": sorted(list(pair) for pair in contract.inverses if set(pair) <= hooks.keys()),
        "capabilities": sorted(
            name for name, since in contract.capabilities.items() if since <= version
        ),
    }


def _shape(value: object) -> object:
    if isinstance(value, type) and issubclass(value, enum.Enum):
        return {"kind": "enum", "members": {member.name: member.value for member in value}}
    if get_origin(value) is Literal:
        return {"kind": "literal", "members": {str(each): each for each in get_args(value)}}
    if isinstance(value, type):
        return {
            "kind": "tuple" if issubclass(value, tuple) else "class",
            "takes": parameters(value),
            "offers": {
                name: "property" if isinstance(member, READABLE) else parameters(member)
                for name, member in sorted(vars(value).items())
                if not name.startswith(("_", "model_"))
                and (inspect.isfunction(member) or isinstance(member, READABLE))
            },
        }
    if inspect.isfunction(value):
        return {"kind": "function", "takes": parameters(value)}
    return value if isinstance(value, (str, int)) else type(value).__name__


def parameters(function: Callable[..., Any]) -> list[str]:
    """Parameters in order, without types: `name`, `name=default`, `*, name=default`."""
    if getattr(function, "__init__", None) is Exception.__init__:  # Pythons differ on these
        return ["*args"]
    found = []
    for each in inspect.signature(function).parameters.values():
        if each.name == "self":
            continue
        text = STARS.get(each.kind.name, "") + each.name
        default = getattr(each.default, "__name__", None) or repr(each.default)
        found.append(text if each.default is each.empty else f"{text}={default}")
    return found


def _differences(where: str, old: object, new: object) -> Iterator[str]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            inner = f"{where}.{key}" if where else str(key)
            if key not in new:
                yield f"{inner} is gone"
            elif key not in old:
                yield f"{inner} is new"
            else:
                yield from _differences(inner, old[key], new[key])
    elif old != new:
        yield f"{where} was {json.dumps(old)}, is {json.dumps(new)}"


def _broken(where: str, old: Any, new: Any) -> Iterator[str]:
    """Breaks of one shape; additions that nobody notices are none."""
    if not isinstance(old, dict) or not isinstance(new, dict):
        yield from _differences(where, old, new)
        return
    for key in sorted(old):
        inner = f"{where}.{key}"
        if key not in new:
            yield f"{inner} is gone"
        elif key in ("members", "offers"):
            for name in sorted(old[key]):
                if name not in new[key]:
                    yield f"{inner}.{name} is gone"
                elif isinstance(old[key][name], list) and isinstance(new[key][name], list):
                    grown = _grown(old[key][name], new[key][name], in_order=True)
                    yield from (f"{inner}.{name} {reason}" for reason in grown)
                elif old[key][name] != new[key][name]:
                    yield f"{inner}.{name} was {old[key][name]!r}, is {new[key][name]!r}"
        elif key == "takes":
            # Fields appended to a tuple are read by name; a class that components extend gets
            # keyword-only ones, or their own fields would move.
            for reason in _grown(old[key], new[key], in_order=old["kind"] != "class"):
                yield f"{inner} {reason}"
        else:
            yield from _differences(inner, old[key], new[key])


def _grown(old: list[str], new: list[str], *, in_order: bool) -> Iterator[str]:
    """Why a function with `new` cannot be called like one with `old`."""
    placed = [each for each in old if not each.startswith("*")]
    named = [each for each in old if each.startswith("*")]
    now_placed = [each for each in new if not each.startswith("*")]
    if now_placed[: len(placed)] != placed or not set(named) <= set(new):
        yield f"was ({', '.join(old)}), is ({', '.join(new)})"
        return
    for added in now_placed[len(placed) :]:
        if "=" not in added:
            yield f"has a new {added} without a default"
        elif not in_order:
            yield f"has a new {added} that is not keyword-only"
    for added in new:
        if added.startswith("*, ") and added not in named and "=" not in added:
            yield f"has a new {added[3:]} without a default"


if __name__ == "__main__":
    print(json.dumps(surface(), indent=1))  # noqa: T201
