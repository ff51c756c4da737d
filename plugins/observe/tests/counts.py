"""A cache's counts in which every number is another."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from kvgraft.stats import CacheStats
from kvgraft.types import PointKind
from kvgraft_retention.stats import PinStats, TenantStats
from kvgraft_storage.stats import StorageStats

__all__ = ["distinct_counts", "leaves"]

KEYS = {"components": ("full", "mamba"), "points": tuple(PointKind)}
PARTS = {"tenants": TenantStats, "pins": PinStats, "storage": StorageStats}
"""The types of counts that a package brings; the core names none."""

TEXTS = {"breaker": "half-open", "last_error": "no route to host"}


def distinct_counts() -> CacheStats:
    """Counts with 2, 3, 4, ... as their numbers, and a name or two as the keys of each mapping."""
    found = _made(CacheStats, "", itertools.count(2))
    assert isinstance(found, CacheStats)
    return found


def _made(kind: Any, name: str, numbers: Iterator[int]) -> Any:
    """A value of a type, as an attribute of that name."""
    arguments = typing.get_args(kind)
    if kind is int:
        return next(numbers)
    if kind is str:
        return TEXTS[name]
    if typing.get_origin(kind) is tuple:
        return (_made(arguments[0], name, numbers), _made(arguments[0], name, numbers))
    if isinstance(typing.get_origin(kind), type) and issubclass(typing.get_origin(kind), Mapping):
        keys = KEYS.get(name, (f"{name} a", f"{name} b"))
        each = PARTS.get(name, arguments[1])
        return {key: _made(each, key, numbers) for key in keys}
    if arguments:  # X | None
        return _made(arguments[0], name, numbers)
    kind = PARTS.get(name, kind)
    types = typing.get_type_hints(kind)
    return kind(*(_made(types[field], field, numbers) for field in kind._fields))


def leaves(value: Any, name: str = "stats") -> Iterator[tuple[str, int]]:
    """The numbers in counts that a metric must show: not those that others add up to.

    Yields:
        Where a number is, and the number.
    """
    if isinstance(value, int):
        yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from leaves(each, f"{name}[{key!r}]")
    elif isinstance(value, tuple):
        fields = getattr(value, "_fields", range(len(value)))
        for field, each in zip(fields, value):
            if field not in ("asked", "capacity", "started"):
                yield from leaves(each, f"{name}.{field}")
