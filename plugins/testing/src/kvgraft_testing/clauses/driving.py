"""Clauses that the state machine decides, rule by rule.

The machine runs once per component; each clause here reads its result. A run that ends at one
broken rule leaves the others undecided.
"""

from __future__ import annotations

from functools import partial

from kvgraft.errors import ContractViolation
from kvgraft_testing.clause import Clause, Undecided, register
from kvgraft_testing.machine import MACHINE_RULES
from kvgraft_testing.rules import RULES
from kvgraft_testing.subject import Subject

__all__ = ["driven"]

STATE_RULES = frozenset({"M8", "I7", "A10"})
"""Rules about states alone."""

MIRROR_RULES = frozenset(
    {
        *("B1", "B2", "B3", "B4", "B5", "B6", "E4", "E5", "R1", "R4", "R5", "R6", "R7", "R8"),
        *("S2", "S3", "S4", "S5", "S7", "S9", "S10"),
    }
)
"""Rules about a host tier, and about a store behind it."""


def driven(rule: str, subject: Subject) -> None:
    """Raise the state machine's violation, if it is about the rule."""
    found = subject.driven
    if found.violation is None:
        if not found.counts["admitted"]:
            raise ContractViolation(
                "A8", subject.name, f"none of {found.counts['admit']} requests was admitted"
            )
        return
    if found.violation.rule == rule:
        raise found.violation
    raise Undecided(f"the state machine stopped at {found.violation.rule}")


def _needs(rule: str, subject: Subject) -> str | None:
    if rule in STATE_RULES and not subject.is_state:
        return "about states; the component has pages"
    if rule in MIRROR_RULES and not subject.is_mirrored:
        return "about a host tier; the component has no mirror"
    return None


register(
    Clause(rule, "driven", RULES[rule], "1.0", partial(_needs, rule), partial(driven, rule))
    for rule in RULES
    if rule in MACHINE_RULES
)
