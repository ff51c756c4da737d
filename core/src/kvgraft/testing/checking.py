"""Running the clauses on one component, without pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from kvgraft.answers import ANSWERS
from kvgraft.errors import (
    ConfigError,
    ContractViolation,
    KvgraftError,
    PluginError,
    PluginHookError,
)
from kvgraft.registry import Plugin, select
from kvgraft.rules import RULES
from kvgraft.testing import clauses as _registered  # noqa: F401 - fills CLAUSES
from kvgraft.testing.clause import CLAUSES, Clause, Undecided
from kvgraft.testing.profiles import profile_named
from kvgraft.testing.result import Result, Status
from kvgraft.testing.subject import Subject

__all__ = ["BROKEN", "Checker", "check_component"]

LOADS = "The component can be loaded and built."
"""What must hold before any rule can be looked at."""


BROKEN = frozenset({Status.FAILED, Status.EXPECTED_FAILURE})
"""How a clause ends whose rule is broken."""

FORMS = frozenset(answer.rule for answer in ANSWERS.values())
"""Rules that are broken by answers of another form, whichever clause asked for them."""


class Checker:
    """The clauses over one component.

    Args:
        plugin: the component package.
        options: its options.
        profile: name of a profile: how hard the state machine looks.
        expected_failures: rules it is known to break, with reasons; strict: one that is kept
            counts as a failure.

    Raises:
        ConfigError: an expected failure of a rule that does not exist, or options that the
            component refuses.
        PluginError: a component that cannot be built.
    """

    def __init__(
        self,
        plugin: Plugin,
        options: Mapping[str, Any] | None = None,
        profile: str = "ci",
        expected_failures: Mapping[str, str] | None = None,
    ) -> None:
        self.expected = _expectations(expected_failures)
        self.subject = Subject(
            plugin, _given(options), profile_named(profile), frozenset(self.expected)
        )
        self.subject.expect_buildable()

    def run(self, progress: Callable[[Result], None] = lambda result: None) -> list[Result]:
        """Every clause, then the verdict."""
        results = []
        for result in self._results():
            progress(result)
            results.append(result)
        return results

    def _results(self) -> Iterator[Result]:
        results = []
        for entry in CLAUSES.values():
            results.append(self.check(entry))
            yield results[-1]
        for result in self.verdict():
            results.append(result)
            yield result
        undecided = [each for each in results if each.status is Status.UNDECIDED]
        if undecided and not any(each.status in BROKEN for each in results):
            yield replace(undecided[0], status=Status.FAILED)

    def verdict(self) -> Iterator[Result]:
        """What no clause stands for: other rules the state machine found broken, expectations."""
        found = self.subject.driven.violation
        if found is not None and self.told_by is None:
            yield self.finding()
        for rule, reason in self.expected.items():
            if not self._breaks(rule):
                yield Result(
                    self.subject.name,
                    f"{rule}-expected",
                    rule,
                    RULES[rule],
                    Status.UNEXPECTED_PASS,
                    f"expected to fail ({reason}), and kept; drop the expectation",
                )

    @property
    def told_by(self) -> str | None:
        """The clause that reports what the state machine found, if one is asked."""
        found = self.subject.driven.violation
        entry = CLAUSES.get(f"{found.rule}-driven") if found is not None else None
        if entry is None or entry.applies(self.subject) is not None:
            return None
        return entry.ident

    def finding(self) -> Result:
        """What the state machine found, wherever it is asked.

        Raises:
            AssertionError: it found nothing.
        """
        found = self.subject.driven.violation
        assert found is not None
        return self._failed(found.rule, f"{found.rule}-driven", found, 0.0)

    def check(self, entry: Clause) -> Result:
        """One clause."""
        name, start = self.subject.name, perf_counter()
        reason = entry.applies(self.subject)
        if reason is not None:
            return self._result(entry, Status.NOT_APPLICABLE, reason)
        try:
            entry.check(self.subject)
        except ContractViolation as violation:
            return self._failed(
                violation.rule, entry.ident, violation, perf_counter() - start, entry
            )
        except Undecided as undecided:
            return self._result(entry, Status.UNDECIDED, str(undecided))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a component's is a finding
            told = str(error) if isinstance(error, KvgraftError) else repr(error)
            rule = error.rule if isinstance(error, PluginError) and error.rule in FORMS else ""
            raised = ContractViolation(rule or entry.rule, name, told)
            return self._failed(raised.rule, entry.ident, raised, perf_counter() - start, entry)
        return self._result(entry, Status.PASSED, "", perf_counter() - start)

    # -- inside

    def _breaks(self, rule: str) -> bool:
        """Whether a clause finds the rule broken, or the state machine when it looks for it."""
        own = [entry for entry in CLAUSES.values() if entry.rule == rule]
        if any(self.check(entry).status is Status.EXPECTED_FAILURE for entry in own):
            return True
        found = self.subject.drive(self.subject.ignored - {rule}).violation
        return found is not None and found.rule == rule

    def _result(self, entry: Clause, status: Status, evidence: str, seconds: float = 0.0) -> Result:
        return Result(
            self.subject.name,
            entry.ident,
            entry.rule,
            entry.sentence,
            status,
            evidence,
            seconds=round(seconds, 3),
        )

    def _failed(
        self,
        rule: str,
        ident: str,
        violation: ContractViolation,
        seconds: float,
        entry: Clause | None = None,
    ) -> Result:
        driven = ident.endswith("driven")
        sentence = entry.sentence if entry is not None and entry.rule == rule else RULES[rule]
        return Result(
            self.subject.name,
            ident,
            rule,
            sentence,
            Status.EXPECTED_FAILURE if rule in self.expected else Status.FAILED,
            violation.evidence,
            tuple(self.subject.driven.steps) if driven else (),
            round(seconds, 3),
        )


def _expectations(given: object) -> dict[str, str]:
    """Rules that are known to be broken, with reasons.

    Raises:
        ConfigError: something else was given, a rule that does not exist, or no reason.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"expected_failures is {given!r}; give rules with reasons, such as {{'M4': 'why'}}"
        )
    for rule, reason in (given or {}).items():
        if rule not in RULES:
            raise ConfigError(
                f"expected failure {rule!r} is no rule of docs/contract.md, such as M4"
            )
        if not isinstance(reason, str) or not reason.strip():
            raise ConfigError(f"expected failure {rule!r}: {reason!r} is no reason; say why")
    return dict(given or {})


def _given(options: object) -> Mapping[str, Any]:
    """Options of a component.

    Raises:
        ConfigError: something else was given.
    """
    if options is not None and not isinstance(options, Mapping):
        raise ConfigError(
            f"options are {options!r}; give names with values, such as {{'window': 8}}"
        )
    return options or {}


def check_component(
    name: str,
    *,
    options: Mapping[str, Any] | None = None,
    plugin: Plugin | None = None,
    profile: str = "ci",
    expected_failures: Mapping[str, str] | None = None,
    progress: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Run every clause of the contract on one component.

    Args:
        name: the component, as installed.
        options: its options; pools of 9 to 20 slots and pages of 1, 2 and 4 tokens are used.
        plugin: a package to check instead of the installed one.
        profile: `"dev"`, `"ci"` or `"nightly"`.
        expected_failures: rules it is known to break, with reasons.
        progress: called with each result as it comes.

    Returns:
        One result per clause, in the contract's order. A package that cannot be loaded or built
        has one.

    Raises:
        ConfigError: the component is not installed or refuses the options, or a profile or rule is
            unknown.
    """
    try:
        loaded = plugin if plugin is not None else select([name])[0]
        checker = Checker(loaded, options, profile, expected_failures)
    except PluginError as error:
        result = _unusable(name, error)
        progress(result)
        return [result]
    return checker.run(progress)


def _unusable(name: str, error: PluginError) -> Result:
    """The one result of a package that cannot be loaded or built."""
    if isinstance(error, PluginHookError) or not error.rule:
        return Result(name, "loads", "", LOADS, Status.FAILED, str(error))
    return Result(
        name, f"{error.rule}-loads", error.rule, RULES[error.rule], Status.FAILED, str(error)
    )
