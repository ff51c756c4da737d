"""The contract as something to run: clauses, the state machine, and three ways to run them.

    class TestMine(ComponentContract):          pytest
        component = "mine"

    results = check_component("mine")           a list, without pytest

    kvgraft check mine                          the command line

Needs the extra `kvgraft[testing]`: pytest and Hypothesis. See `docs/write-a-component.md`.
"""

from __future__ import annotations

try:
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"kvgraft.testing needs {missing.name}; pip install 'kvgraft[testing]'", name=missing.name
    ) from None

from kvgraft.testing.checking import check_component
from kvgraft.testing.clause import CLAUSES, Clause
from kvgraft.testing.component_contract import ComponentContract
from kvgraft.testing.profiles import PROFILES, Profile
from kvgraft.testing.result import Result, Status

__all__ = [
    "CLAUSES",
    "PROFILES",
    "Clause",
    "ComponentContract",
    "Profile",
    "Result",
    "Status",
    "check_component",
]
