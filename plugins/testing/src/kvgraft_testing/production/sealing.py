"""Whether code changed kvgraft, or the modules that drive it, during the suite (P10).

A component that is checked runs beside the suite. Functions it could silence are noted before its
code runs: every function and class of kvgraft and of Hypothesis, kvgraft's constants, and the calls
that end a process. Every replaced object is named, and put back.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

__all__ = ["Told", "seal"]

OURS = (
    "kvgraft",
    "kvgraft_accelerator",
    "kvgraft_arena",
    "kvgraft_guard",
    "kvgraft_observe",
    "kvgraft_storage",
    "kvgraft_testing",
)
"""The core and its parts."""

WATCHED = (*OURS, "hypothesis")
"""Packages that a component must not change."""

CALLS: tuple[tuple[ModuleType, str], ...] = ((os, "_exit"), (sys, "exit"))
"""Functions that a component must not replace."""

MOST = 3
"""Most changes that are named."""

CODE = (FunctionType, property, classmethod, staticmethod)


class _Name(NamedTuple):
    """A name in a module or class, and its original value."""

    owner: Any
    names: Mapping[str, Any]
    attribute: str
    value: Any


class _Function(NamedTuple):
    """A function, and its original code."""

    function: FunctionType
    code: object
    defaults: object
    keywords: object


Told = Callable[[], str]
"""Undoes the changes since the seal was taken and names them in one line; empty if none."""


class _Taken:
    """The sealed objects."""

    def __init__(self) -> None:
        self.names: list[_Name] = []
        self.functions: list[_Function] = []
        self.contents: list[tuple[str, Any, Any]] = []
        self._seen: set[int] = set()
        for name, module in sorted(sys.modules.items()):
            if name.partition(".")[0] in WATCHED and isinstance(module, ModuleType):
                self._take_module(module)
        for owner, attribute in CALLS:
            self.names.append(_Name(owner, vars(owner), attribute, getattr(owner, attribute)))

    def _take_module(self, module: ModuleType) -> None:
        # Hypothesis keeps counters and caches in its modules; kvgraft keeps constants only.
        constant = module.__name__.partition(".")[0] in OURS
        names = vars(module)
        for attribute, value in list(names.items()):
            if attribute.startswith("__"):
                continue
            if constant or callable(value):
                self.names.append(_Name(module, names, attribute, value))
            if constant and isinstance(value, (dict, list, set)) and id(value) not in self._seen:
                self._seen.add(id(value))
                place = f"{module.__name__}.{attribute}"
                self.contents.append((place, value, value.copy()))
            self._take(value)

    def _take(self, value: Any) -> None:
        package = str(getattr(value, "__module__", "")).partition(".")[0]
        if package not in WATCHED or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, FunctionType):
            held = (value.__code__, value.__defaults__, value.__kwdefaults__)
            self.functions.append(_Function(value, *held))
        elif isinstance(value, type):
            names = vars(value)
            for attribute, inner in list(names.items()):
                if isinstance(inner, CODE):
                    self.names.append(_Name(value, names, attribute, inner))
                    self._take(getattr(inner, "__func__", getattr(inner, "fget", inner)))


def seal() -> Told:
    """Note the objects that a component must not change, before its code runs.

    Modules that are imported later, and added names, are not checked.

    Returns:
        A function that says whether something changed. It is a closure over plain values: nothing
        that it uses can be replaced by assigning to a name.
    """
    taken = _Taken()
    names, functions, contents = taken.names, taken.functions, taken.contents

    def same(now: Any, then: Any) -> bool:
        """Whether a collection holds the same objects as before."""
        if len(now) != len(then):
            return False
        if isinstance(now, dict):
            pairs = zip(now.items(), then.items())
            return all(a[0] is b[0] and a[1] is b[1] for a, b in pairs)
        return now == then if isinstance(now, set) else all(map(is_same, now, then))

    def told() -> str:
        changed = []
        for owner, held, attribute, value in names:
            if held.get(attribute) is not value:
                setattr(owner, attribute, value)
                module = getattr(owner, "__module__", None)
                name = getattr(owner, "__qualname__", owner.__name__)
                changed.append(f"{module}.{name}.{attribute}" if module else f"{name}.{attribute}")
        for function, code, defaults, keywords in functions:
            was: Any = function
            if (was.__code__, was.__defaults__, was.__kwdefaults__) != (code, defaults, keywords):
                was.__code__, was.__defaults__, was.__kwdefaults__ = code, defaults, keywords
                changed.append(f"the code of {was.__module__}.{was.__qualname__}")
        for place, now, then in contents:
            if not same(now, then):
                now.clear()
                (now.extend if isinstance(now, list) else now.update)(then)
                changed.append(f"the contents of {place}")
        if not changed:
            return ""
        more = f" and {len(changed) - most} more" if len(changed) > most else ""
        return f"its code replaced {', '.join(changed[:most])}{more}"

    most, is_same = MOST, operator.is_
    return told
