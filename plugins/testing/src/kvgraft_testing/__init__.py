"""Tests for the contract: clauses, the state machine, and three ways to run them.

    class TestMine(ComponentContract):          pytest
        component = "mine"

    results = check_component("mine")           a list, without pytest

    kvgraft check mine                          the command line

`check_restored_logits` compares a model after restored prefixes with one pass over all tokens: the
contract knows only the declared reach, not the model's.

See `docs/write-a-component.md`.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvgraft.optional import PARTS, how_to_install

for _needed in ("hypothesis", "pytest", "kvgraft_density"):
    if sys.modules.get(_needed, find_spec) is None or find_spec(_needed) is None:
        raise ModuleNotFoundError(
            f"kvgraft_testing needs {_needed}; {how_to_install(*PARTS['simulated'])}", name=_needed
        )

if TYPE_CHECKING:
    from kvgraft_testing.checking import check_component
    from kvgraft_testing.clause import CLAUSES, Clause
    from kvgraft_testing.component_contract import ComponentContract
    from kvgraft_testing.logits import (
        LogitsDifference,
        LogitsReport,
        PooledModel,
        check_restored_logits,
    )
    from kvgraft_testing.profiles import PROFILES, Profile
    from kvgraft_testing.result import Result, Status

__all__ = [
    "CLAUSES",
    "PROFILES",
    "Clause",
    "ComponentContract",
    "LogitsDifference",
    "LogitsReport",
    "PooledModel",
    "Profile",
    "Result",
    "Status",
    "check_component",
    "check_restored_logits",
]

_LAZY = {
    "CLAUSES": "checking",
    "PROFILES": "profiles",
    "Clause": "clause",
    "ComponentContract": "component_contract",
    "LogitsDifference": "logits",
    "LogitsReport": "logits",
    "PooledModel": "logits",
    "Profile": "profiles",
    "Result": "result",
    "Status": "result",
    "check_component": "checking",
    "check_restored_logits": "logits",
}
"""Modules of the names; a process that only reads another one's results loads no state machine."""


def __getattr__(name: str) -> object:
    """Import a public name when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
