"""The names that engines use, as plain data to record and compare.

    python -m tests.versioning.engine_names > tests/versioning/engine_names.json

records them. That of a release is edited only with a new minor number of the distributions, while
the first number is 0.
"""

from __future__ import annotations

import enum
import inspect
import json
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel

import kvgraft

from .surface import READABLE, parameters

__all__ = ["RECORDED", "engine_names"]

RECORDED = Path(__file__).with_suffix(".json")


def engine_names() -> dict[str, Any]:
    """Every public name of `kvgraft`, with what it takes and offers."""
    return {name: _shape(getattr(kvgraft, name)) for name in sorted(kvgraft.__all__)}


def _shape(value: object) -> object:
    if inspect.isfunction(value):
        return parameters(value)
    if not isinstance(value, type) or get_origin(value) is not None:
        return value if isinstance(value, str) else type(value).__name__
    if issubclass(value, enum.Enum):
        return {member.name: str(member.value) for member in value}
    if issubclass(value, BaseModel):
        return {
            name: "required" if field.is_required() else repr(field.get_default())
            for name, field in sorted(value.model_fields.items())
        }
    members: dict[str, Any] = {}
    for each in reversed(value.__mro__):
        if each.__module__.startswith("kvgraft"):
            members |= vars(each)
    return {
        "takes": parameters(value),
        "offers": {
            name: "property" if isinstance(member, READABLE) else parameters(getattr(value, name))
            for name, member in sorted(members.items())
            if not name.startswith("_")
            and (isinstance(member, (*READABLE, classmethod)) or inspect.isfunction(member))
        },
    }


if __name__ == "__main__":
    print(json.dumps(engine_names(), indent=1))  # noqa: T201
