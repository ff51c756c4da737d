"""Broken rules: failed expectations and the core's errors, as `ContractViolation`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from kvgraft.errors import (
    BudgetError,
    ContractViolation,
    LeaseError,
    PluginError,
    PluginHookError,
    TransferError,
)
from kvgraft.packages.dispatch import HOOK_RESULTS

__all__ = ["HOOK_RULES", "Judge", "ReaderError", "Stopped", "as_violation"]

HOOK_RULES = {
    "create_component": "P7",
    "finalize_match_result": "M5",
    "acquire_component_lock": "L1",
    "release_component_lock": "L1",
    "build_hicache_transfers": "R2",
    "commit_hicache_transfers": "R2",
    "abort_hicache_transfers": "R2",
    "budget_contribution": "A1",
}
"""The rule a hook breaks by raising."""

HOOK_RESULT_RULES = frozenset(answer.rule for answer in HOOK_RESULTS.values())
"""Rules that a hook breaks by returning a wrong type."""


RAISED = {"allocate": "A7", "load back": "A7", "admit": "A7", "explain": "M9"}
"""The rule that an operation breaks by raising: for most, that it changes nothing."""


class ReaderError(Exception):
    """An observer of events raised it; it must not come out of the core."""


class Stopped(Exception):  # noqa: N818 - the end of an example, not an error
    """A call failed under an ignored rule, so the example cannot go on."""


class Judge:
    """Raises broken rules, but for those that are ignored.

    Args:
        ignored: rules that are known to be broken; they are counted instead.

    Attributes:
        passed_over: how often each ignored rule was broken.
    """

    def __init__(self, ignored: frozenset[str] = frozenset()) -> None:
        self.ignored = ignored
        self.passed_over: Counter[str] = Counter()

    def expect(
        self, condition: object, rule: str, component: str | None, evidence: Callable[[], str]
    ) -> None:
        """Raise `ContractViolation` unless the condition holds; `evidence` is asked only then."""
        if not condition:
            self.fail(rule, component, evidence())

    def fail(self, rule: str, component: str | None, evidence: str) -> None:
        """Raise `ContractViolation`; return if the rule is ignored."""
        if rule not in self.ignored:
            raise ContractViolation(rule, component, evidence)
        self.passed_over[rule] += 1

    def refuse(self, error: Exception, operation: str) -> None:
        """Raise an operation's error as a broken rule; return if that is ignored."""
        violation = as_violation(error, operation)
        if violation.rule not in self.ignored:
            raise violation from (None if violation is error else error)
        self.passed_over[violation.rule] += 1


def as_violation(error: Exception, operation: str) -> ContractViolation:
    """An error of the core, as the rule that it breaks."""
    if isinstance(error, ContractViolation):
        return error
    said = f"{operation}: {error}"
    if isinstance(error, ReaderError):
        return ContractViolation("V3", None, said)
    if isinstance(error, PluginHookError):
        return ContractViolation(HOOK_RULES.get(error.hook, "I8"), error.plugin, said)
    if isinstance(error, PluginError):
        if error.rule in HOOK_RESULT_RULES:
            return ContractViolation(error.rule, error.plugin, said)
        named = (rule for hook, rule in HOOK_RULES.items() if hook in str(error))
        rule = error.rule or HOOK_RULES["create_component"]
        return ContractViolation(next(named, rule), error.plugin, said)
    if isinstance(error, (TransferError, BudgetError)):
        return ContractViolation("A7", None, said)
    if isinstance(error, LeaseError):
        return ContractViolation("L2", None, said)
    rule = RAISED.get(operation, "I8")
    return ContractViolation(rule, None, f"{operation} raised {type(error).__name__}: {error}")
