"""The component without the suite around it, and its effects on its surroundings (P9, P10, D1).

These run first: a component that blocks or ends the process cannot be checked further, and if a
hook raises, or answers differently each time, other clauses fail for that reason alone.
"""

from __future__ import annotations

from functools import partial

from kvgraft.errors import ContractViolation
from kvgraft_testing.clause import Clause, clause, expect, register
from kvgraft_testing.subject import Subject

__all__ = ["ANSWERING"]


def _raise(found: ContractViolation | None, rule: str) -> None:
    if found is not None and found.rule == rule:
        raise found


@clause("P9", "Hooks return at once.")
def hooks_return_at_once(subject: Subject) -> None:
    _raise(subject.unusable, "P9")


@clause("P10", "The process goes on after every call.")
def the_process_goes_on(subject: Subject) -> None:
    _raise(subject.unusable, "P10")


@clause("P10", "The code of kvgraft and of its drivers is not changed.")
def nothing_is_replaced(subject: Subject) -> None:
    expect(not subject.replaced, "P10", subject, subject.replaced)


@clause("D1", "Asked the same, it does the same, at any time.")
def it_does_the_same_each_time(subject: Subject) -> None:
    if subject.difference_when_repeated is not None:
        raise ContractViolation("D1", subject.name, subject.difference_when_repeated)


@clause("D1", "Beside caches of other sizes and options it does the same as alone.")
def a_second_cache_changes_no_answer(subject: Subject) -> None:
    if subject.difference_beside_caches is not None:
        raise ContractViolation("D1", subject.name, subject.difference_beside_caches)


@clause("D1", "It does the same where there is no suite.")
def it_does_the_same_without_the_suite(subject: Subject) -> None:
    if subject.difference_beside_suite is not None:
        raise ContractViolation("D1", subject.name, subject.difference_beside_suite)


ANSWERING = {
    "M5": ("finalize_match_result",),
    "L1": ("acquire_component_lock",),
    "L3": ("acquire_component_lock",),
    "R2": ("build_hicache_transfers",),
    "A1": ("budget_contribution",),
}
"""The hooks that break a rule by raising, or by returning a wrong type."""


def _has(hooks: tuple[str, ...], subject: Subject) -> str | None:
    return None if any(map(subject.has, hooks)) else "the hook is left to the core"


def _answers(rule: str, subject: Subject) -> None:
    _raise(subject.refused, rule)


register(
    Clause(
        rule,
        "hooks-answer",
        "A hook raises nothing and answers in its form.",
        "1.0",
        partial(_has, hooks),
        partial(_answers, rule),
    )
    for rule, hooks in ANSWERING.items()
)
