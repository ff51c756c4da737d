"""The contract as a pytest class that holds data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from kvgraft.errors import KvgraftError
from kvgraft.registry import Plugin, select
from kvgraft.testing.checking import Checker
from kvgraft.testing.clause import CLAUSES
from kvgraft.testing.result import Result, Status

__all__ = ["ComponentContract"]

DATA = frozenset({"component", "options", "expected_failures", "profile", "plugin"})
"""What a subclass may set."""

CHECKERS = pytest.StashKey[dict[type, Checker]]()
"""Where a test session keeps them."""


class ComponentContract:
    """Every clause of the contract as a test of one component.

        class TestSinks(ComponentContract):
            component = "sinks"
            options = {"window": 8, "sinks": 4}

    A subclass sets data and nothing else; anything more is a `TypeError` when it is imported. A
    component that cannot be loaded or built is one error when tests are collected.

    Attributes:
        component: the component's name.
        options: its options; small pools and shapes make it fast.
        expected_failures: rules it is known to break, with reasons. Strict: one that is kept, or
            does not exist, fails.
        profile: how hard the state machine looks; by default what `--contract-profile` says.
        plugin: a package to check instead of the installed one.
    """

    component: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    expected_failures: ClassVar[Mapping[str, str]] = {}
    profile: ClassVar[str | None] = None
    plugin: ClassVar[Plugin | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        own = {name for name in vars(cls) if not (name.startswith("__") and name != "__test__")}
        if own - DATA:
            raise TypeError(
                f"{cls.__name__} defines {', '.join(sorted(own - DATA))}; a contract class holds "
                f"data only: {', '.join(sorted(DATA))}"
            )

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Load the component; where that is not possible there is one error instead of tests."""
        try:
            _checker(type(self), metafunc.config)
        except KvgraftError as error:
            raise pytest.Collector.CollectError(str(error)) from None

    @pytest.mark.parametrize("ident", list(CLAUSES))
    def test_clause(self, ident: str, request: pytest.FixtureRequest, record_property: Any) -> None:
        """One clause."""
        _report(_checker(type(self), request.config).check(CLAUSES[ident]), record_property)

    def test_expected_failures(self, request: pytest.FixtureRequest, record_property: Any) -> None:
        """What is expected to fail fails, and the state machine broke no other rule."""
        for result in _checker(type(self), request.config).verdict():
            _report(result, record_property)


def _checker(contract: type[ComponentContract], config: pytest.Config) -> Checker:
    """The clauses over the class's component; the state machine runs once per class."""
    checkers = config.stash.setdefault(CHECKERS, {})
    if contract not in checkers:
        profile = contract.profile or config.getoption("contract_profile", "ci")
        plugin = contract.plugin
        if plugin is None:
            plugin = select([contract.component])[0]
        checkers[contract] = Checker(
            plugin, contract.options, str(profile), contract.expected_failures
        )
    return checkers[contract]


def _report(result: Result, record_property: Any) -> None:
    record_property("contract", result.as_json())
    if result.status in (Status.NOT_APPLICABLE, Status.UNDECIDED):
        pytest.skip(result.evidence)
    if result.status is Status.EXPECTED_FAILURE:
        pytest.xfail(f"{result.rule}: {result.evidence}")
    if result.bad:
        lines = [result.heading, result.evidence]
        lines += [f"  {number}. {step}" for number, step in enumerate(result.steps, 1)]
        pytest.fail("\n".join(lines), pytrace=False)
