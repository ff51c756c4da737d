"""The contract as a pytest class that holds data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from kvgraft.errors import ConfigError, KvgraftError
from kvgraft.packages.registry import Plugin, expect_installed
from kvgraft_testing.checking import expect_arguments, open_suite
from kvgraft_testing.clause import CLAUSES
from kvgraft_testing.process import Unusable
from kvgraft_testing.result import BROKEN, Result, Status
from kvgraft_testing.suite import Suite

__all__ = ["ComponentContract", "expect_sealed"]

DATA = frozenset({"component", "options", "expected_failures", "profile", "plugin"})
"""Attributes that a subclass may set."""

SUITES = pytest.StashKey[dict[type, Suite | Exception]]()
"""Where a test session keeps its suites, or the reason why there is none."""

UNUSABLE = (KvgraftError, TypeError, Unusable)
"""Errors of a class or component that cannot be checked."""

TOLD = pytest.StashKey[set[type]]()
"""The classes for which this process has reported why clauses are undecided."""

HARMLESS = frozenset(
    [
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__firstlineno__",
        "__static_attributes__",
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__conditional_annotations__",
    ]
)
"""Attributes that Python itself puts into a class."""

SILENCING = frozenset({"skip", "skipif", "xfail"})
"""Marks that a contract class must not have."""


class ComponentContract:
    """Every clause of the contract as a test of one component.

        class TestSinks(ComponentContract):
            component = "sinks"
            options = {"window": 8, "sinks": 4}

    A subclass sets data and nothing else; anything more is a `TypeError` at import. A component
    that cannot be loaded or built is one error when tests are collected. A worker of pytest-xdist
    loads it when it runs its first test: there it is one failure, and the others are skipped.

    Attributes:
        component: the component's name.
        options: its options; small pools and shapes make it fast.
        expected_failures: rules it is known to break, with reasons. Strict: one that is kept, or
            does not exist, fails.
        profile: the effort of the state machine; by default the one that `--contract-profile`
            names.
        plugin: a package to check instead of the installed one.
    """

    component: ClassVar[str] = ""
    options: ClassVar[Mapping[str, Any]] = {}
    expected_failures: ClassVar[Mapping[str, str]] = {}
    profile: ClassVar[str | None] = None
    plugin: ClassVar[Plugin | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        expect_sealed(cls)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Load the component; if that fails there is one error instead of tests.

        Every worker of pytest-xdist collects all tests and runs some of them: it loads later.
        """
        try:
            if hasattr(metafunc.config, "workerinput"):
                _expect_checkable(type(self), metafunc.config)
            else:
                _suite(type(self), metafunc.config)
        except UNUSABLE as error:
            raise pytest.Collector.CollectError(str(error)) from None

    @pytest.mark.parametrize("ident", list(CLAUSES))
    def test_clause(self, ident: str, request: pytest.FixtureRequest, record_property: Any) -> None:
        """One clause."""
        suite = _loaded(type(self), request.config)
        result = suite.decide(ident)
        if result.status is Status.UNDECIDED and not _told(type(self), suite, request):
            result = suite.finding() or result
        if result.status in BROKEN:
            found = suite.finding()
            if found is not None and found.clause == result.clause:
                request.config.stash[TOLD].add(type(self))
        _report(result, record_property)

    def test_expected_failures(self, request: pytest.FixtureRequest, record_property: Any) -> None:
        """Expected failures fail, and the state machine broke no other rule."""
        for result in _loaded(type(self), request.config).verdict():
            _report(result, record_property)


def expect_sealed(contract: type) -> None:
    """Refuse a contract class that defines, or inherits, more than data.

    Raises:
        TypeError: names the attributes it defines, or takes from a class beside
            `ComponentContract`.
    """
    for each in contract.__mro__:
        if each in (ComponentContract, object):
            continue
        own = {name for name in vars(each) if name not in HARMLESS}
        marks = own & {"pytestmark"}
        if marks and not SILENCING & set(_marks(vars(each)["pytestmark"])):
            own -= marks
        if own - DATA:
            how = "defines" if each is contract else f"takes from {each.__name__}"
            raise TypeError(
                f"{contract.__name__} {how} {', '.join(sorted(own - DATA))}; a contract class "
                f"holds data only: {', '.join(sorted(DATA))}"
            )


def _marks(marks: Any) -> list[str]:
    return [mark.name for mark in (marks if isinstance(marks, (list, tuple)) else [marks])]


def _suite(contract: type[ComponentContract], config: pytest.Config) -> Suite:
    """The clauses over the class's component; the state machine runs once per class and process."""
    suites = config.stash.setdefault(SUITES, {})
    config.stash.setdefault(TOLD, set())
    if contract not in suites:
        try:
            suites[contract] = suite = open_suite(*_given(contract, config))
        except UNUSABLE as error:
            suites[contract] = error
        else:
            config.add_cleanup(suite.close)
    found = suites[contract]
    if isinstance(found, Exception):
        raise found
    return found


def _expect_checkable(contract: type[ComponentContract], config: pytest.Config) -> None:
    """Refuse all that is refused without loading the component."""
    name, options, plugin, profile, expected_failures = _given(contract, config)
    expect_arguments(options, profile, expected_failures)
    if plugin is None:
        expect_installed(name)


def _given(contract: type[ComponentContract], config: pytest.Config) -> tuple[Any, ...]:
    """The arguments of `open_suite`."""
    expect_sealed(contract)
    name, plugin = _component(contract)
    profile: object = contract.profile
    if profile is None:
        profile = config.getoption("contract_profile", "ci")
    return name, contract.options, plugin, profile, contract.expected_failures


def _loaded(contract: type[ComponentContract], config: pytest.Config) -> Suite:
    """The same in a test, where a component that cannot be loaded is reported once."""
    try:
        return _suite(contract, config)
    except UNUSABLE as error:
        told = config.stash[TOLD]
        if contract in told:
            pytest.skip("the component cannot be loaded, which another test reports")
        told.add(contract)
        pytest.fail(str(error), pytrace=False)


def _component(contract: type[ComponentContract]) -> tuple[str, Plugin | None]:
    """The component to check, and its package where that is given.

    Raises:
        ConfigError: none is named.
    """
    plugin: object = contract.plugin
    if isinstance(plugin, Plugin):
        return plugin.name, plugin
    if plugin is not None:
        raise ConfigError(f"{contract.__name__}: plugin is {plugin!r}; see kvgraft.load_plugin")
    name: object = contract.component
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{contract.__name__}: component is {name!r}; name an installed one")
    return name, None


def _told(contract: type[ComponentContract], suite: Suite, request: pytest.FixtureRequest) -> bool:
    """Whether another test of this process reports why clauses are undecided.

    Each process has a suite of its own. Among several, or where tests are selected, the clause
    that is about the finding may not be asked here.
    """
    if contract in request.config.stash[TOLD]:
        return True
    if hasattr(request.config, "workerinput"):
        return False
    teller = suite.told_by() or "test_expected_failures"
    names = (item.name for item in request.session.items if getattr(item, "cls", None) is contract)
    return any(name in (teller, f"test_clause[{teller}]") for name in names)


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
