"""Running the clauses on one component, without pytest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from time import perf_counter
from typing import Any

from kvgraft.errors import (
    ConfigError,
    ContractViolation,
    KvgraftError,
    PluginError,
    PluginHookError,
)
from kvgraft.packages.dispatch import HOOK_RESULTS
from kvgraft.packages.registry import Plugin
from kvgraft_testing import clauses as _registered  # noqa: F401 - fills CLAUSES
from kvgraft_testing.clause import CLAUSES, Clause, Undecided
from kvgraft_testing.clauses.moving import bad_copies
from kvgraft_testing.clauses.pools import shared_books, shared_pools
from kvgraft_testing.machine.judging import HOOK_RULES
from kvgraft_testing.process import SuiteProcess, Unusable
from kvgraft_testing.production.sealing import Told, seal
from kvgraft_testing.profiles import profile_named
from kvgraft_testing.result import Result, Status
from kvgraft_testing.rules import RULES
from kvgraft_testing.subject import Subject
from kvgraft_testing.suite import Suite

__all__ = ["Checker", "check_component", "expect_arguments", "open_suite", "unusable"]

LOADS = "The component can be loaded and built."
"""The precondition of all rules."""


REPLACED = "P10-nothing-is-replaced"
"""The clause that reports code of kvgraft that was replaced."""

FORMS = frozenset(answer.rule for answer in HOOK_RESULTS.values())
"""Rules that answers of wrong types break, in any clause."""


class Checker(Suite):
    """The clauses over one component, decided in this process.

    Args:
        plugin: the component package.
        options: its options.
        profile: name of a profile: the effort of the state machine.
        expected_failures: rules it is known to break, with reasons; strict:
            one that is kept counts as a failure.
        clauses: the clauses to check; every registered clause by default.
        changes: names the parts of kvgraft that the component changed; by default from now on.
        device: the device of the pools: `"cpu"`, or one that torch has. On `"simulated"` only those
            of the state machine's caches are.

    Raises:
        ConfigError: an expected failure of a rule that does not exist, or options that the
            component refuses; a device that is not here.
        PluginError: a component that cannot be built.
    """

    def __init__(
        self,
        plugin: Plugin,
        options: Mapping[str, Any] | None = None,
        profile: str = "ci",
        expected_failures: Mapping[str, str] | None = None,
        *,
        clauses: Iterable[Clause] | None = None,
        changes: Told | None = None,
        device: str = "cpu",
    ) -> None:
        self.clauses = {each.ident: each for each in clauses or CLAUSES.values()}
        self.idents = tuple(self.clauses)
        self.expected = _expectations(expected_failures)
        self.subject = Subject(
            plugin, _given(options), profile_named(profile), frozenset(self.expected), device
        )
        self._known_cause: tuple[Cause | None] | None = None
        self._changes = changes if changes is not None else seal()
        self.subject.expect_device()
        self.subject.expect_options()
        if self.subject.unusable is None:
            self.subject.expect_buildable()

    def decide(self, ident: str) -> Result:
        """One clause."""
        return self.check(self.clauses[ident])

    def check(self, entry: Clause) -> Result:
        """One clause, and whether the component changed kvgraft meanwhile."""
        result = self._checked(entry)
        self.subject.replaced = self.subject.replaced or self._changes()
        if not self.subject.replaced:
            return result
        if entry.ident == REPLACED:
            return self._failed("P10", REPLACED, self._changed(), result.seconds, entry)
        return self._result(entry, Status.UNDECIDED, f"P10 is broken, which {REPLACED} reports")

    def verdict(self) -> list[Result]:
        """Results beside clauses: other rules that the state machine found broken, expectations."""
        results = []
        found = self.finding()
        if found is not None and self.told_by() is None:
            results.append(found)
        for rule, reason in self.expected.items():
            if not self._breaks(rule):
                results.append(
                    Result(
                        self.subject.name,
                        f"{rule}-expected",
                        rule,
                        RULES[rule],
                        Status.UNEXPECTED_PASS,
                        f"expected to fail ({reason}), and kept; drop the expectation",
                    )
                )
        return results

    def told_by(self) -> str | None:
        """The clause that reports why others are undecided, if any."""
        found = self._found()
        entry = self.clauses.get(found[0]) if found is not None else None
        if entry is None or entry.applies(self.subject) is not None:
            return None
        return entry.ident

    def finding(self) -> Result | None:
        """The finding that leaves clauses undecided, of the component or the state machine."""
        found = self._found()
        return None if found is None else self._failed(found[1].rule, *found, 0.0)

    # -- inside

    def _found(self) -> tuple[str, ContractViolation] | None:
        if self.subject.replaced:
            return REPLACED, self._changed()
        cause = self._cause()
        if cause is not None or self.subject.unusable is not None:
            return cause
        found = self.subject.driven.violation
        return None if found is None else (f"{found.rule}-driven", found)

    def _changed(self) -> ContractViolation:
        return ContractViolation("P10", self.subject.name, self.subject.replaced)

    def _checked(self, entry: Clause) -> Result:
        name, start = self.subject.name, perf_counter()
        reason = entry.applies(self.subject)
        if reason is not None:
            return self._result(entry, Status.NOT_APPLICABLE, reason)
        if self.subject.replaced:
            return self._result(entry, Status.UNDECIDED, "")
        stopped = self.subject.unusable
        if stopped is not None and stopped.rule != entry.rule:
            said = f"{stopped.rule} is broken: nothing more is asked"
            return self._result(entry, Status.UNDECIDED, said)
        try:
            entry.check(self.subject)
        except ContractViolation as violation:
            return self._broken(entry, violation, start)
        except Undecided as undecided:
            return self._result(entry, Status.UNDECIDED, str(undecided))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a component's is a finding
            told = str(error) if isinstance(error, KvgraftError) else repr(error)
            rule = _rule_of(error) or entry.rule
            return self._broken(entry, ContractViolation(rule, name, told), start)
        return self._result(entry, Status.PASSED, "", perf_counter() - start)

    def _broken(self, entry: Clause, violation: ContractViolation, start: float) -> Result:
        """A failure, unless it follows from another, which its own clause reports."""
        seconds = perf_counter() - start
        cause = self._cause()
        if cause is not None and cause[0] != entry.ident:
            said = f"{cause[1].rule} is broken, which {cause[0]} reports"
            return self._result(entry, Status.UNDECIDED, said, seconds)
        return self._failed(violation.rule, entry.ident, violation, seconds, entry)

    def _cause(self) -> tuple[str, ContractViolation] | None:
        """The cause that makes unrelated clauses fail, and the clause that reports it.

        Looked for where a clause has failed, once.
        """
        if self._known_cause is not None:
            return self._known_cause[0]
        self._known_cause = (self._look_for_cause(),)
        return self._known_cause[0]

    def _look_for_cause(self) -> Cause | None:
        subject = self.subject
        for look in CAUSES:
            try:
                found = look(subject)
            except (KvgraftError, AssertionError):
                continue  # the clause that asks it says so
            if found is not None and found[1].rule not in self.expected:
                return found
        return None

    def _breaks(self, rule: str) -> bool:
        """Whether a clause finds the rule broken, or the state machine when it looks for it."""
        own = [entry for entry in self.clauses.values() if entry.rule == rule]
        if any(self.check(entry).status is Status.EXPECTED_FAILURE for entry in own):
            return True
        if self.subject.unusable is not None:
            return False
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


Cause = tuple[str, ContractViolation]
"""A broken rule that makes unrelated clauses fail, with the clause that reports it."""


def _ends_or_blocks(subject: Subject) -> Cause | None:
    found = subject.unusable
    if found is None:
        return None
    return "P9-hooks-return-at-once" if found.rule == "P9" else "P10-the-process-goes-on", found


def _refuses(subject: Subject) -> Cause | None:
    found = subject.refused
    return None if found is None else (f"{found.rule}-hooks-answer", found)


def _shares(subject: Subject) -> Cause | None:
    found = shared_pools(subject)
    if found is not None:
        return "T9-caches-share-nothing", found
    found = shared_books(subject)
    return None if found is None else ("T9-caches-disturb-nobody", found)


def _is_fickle(subject: Subject) -> Cause | None:
    if subject.difference_when_repeated is None:
        return None
    return "D1-it-does-the-same-each-time", ContractViolation(
        "D1", subject.name, subject.difference_when_repeated
    )


def _pretends(subject: Subject) -> Cause | None:
    if subject.difference_beside_suite is None:
        return None
    found = ContractViolation("D1", subject.name, subject.difference_beside_suite)
    return "D1-it-does-the-same-without-the-suite", found


def _copies_badly(subject: Subject) -> Cause | None:
    found = bad_copies(subject)
    return None if found is None else ("B3-copies-cover-every-slot-and-plane", found)


CAUSES: tuple[Callable[[Subject], Cause | None], ...] = (
    _ends_or_blocks,
    _refuses,
    _shares,
    _is_fickle,
    _pretends,
    _copies_badly,
)
"""From the most to the least far-reaching."""


def _rule_of(error: BaseException) -> str:
    """The rule that a plugin breaks by raising or by its answer; empty if that says nothing."""
    if isinstance(error, PluginHookError):
        return HOOK_RULES.get(error.hook, "")
    if isinstance(error, PluginError) and error.rule in FORMS:
        return error.rule
    return ""


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
        name: the component, as installed. It is checked in a process of its own.
        options: its options; pools of 9 to 20 slots and pages of 1, 2 and 4 tokens are used.
        plugin: a package to check instead of the installed one; its code runs in this process.
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
        suite = open_suite(name, options, plugin, profile, expected_failures)
    except Unusable as error:
        progress(error.result)
        return [error.result]
    try:
        return suite.run(progress)
    finally:
        suite.close()


def open_suite(
    name: str,
    options: Mapping[str, Any] | None,
    plugin: Plugin | None,
    profile: str,
    expected_failures: Mapping[str, str] | None,
) -> Suite:
    """The clauses: in a process of their own, or here if the package is given as an object.

    Raises:
        ConfigError: as `check_component` says.
        Unusable: a component that cannot be loaded or built.
    """
    expect_arguments(options, profile, expected_failures)
    if plugin is None:
        return SuiteProcess(name, options, profile, expected_failures)
    try:
        return Checker(plugin, options, profile, expected_failures)
    except PluginError as error:
        raise Unusable(unusable(name, error)) from error


def expect_arguments(options: object, profile: object, expected_failures: object) -> None:
    """Refuse wrong arguments that need no component to check, before a process is started.

    Raises:
        ConfigError: an argument of `open_suite` is invalid.
    """
    _given(options)
    profile_named(profile)
    _expectations(expected_failures)


def unusable(name: str, error: PluginError) -> Result:
    """The one result of a package that cannot be loaded or built."""
    if isinstance(error, PluginHookError) or not error.rule:
        return Result(name, "loads", "", LOADS, Status.FAILED, str(error))
    return Result(
        name, f"{error.rule}-loads", error.rule, RULES[error.rule], Status.FAILED, str(error)
    )
