"""Clauses of tiers, one sentence each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvgraft_testing.tiers.rules import TIER_RULES
from kvgraft_testing.tiers.subject import TierSubject

__all__ = ["TIER_CLAUSES", "NotApplicable", "TierClause", "tier_clause"]

Check = Callable[[TierSubject], None]


class NotApplicable(Exception):  # noqa: N818 - an outcome, not an error
    """A clause has nothing to look at in this tier; the text says why."""


class TierClause(NamedTuple):
    """One clause.

    Attributes:
        rule: the rule it is part of.
        name: unique.
        sentence: the condition checked.
        check: raises `ContractViolation` if it does not hold, `NotApplicable` if it cannot tell.
    """

    rule: str
    name: str
    sentence: str
    check: Check

    @property
    def ident(self) -> str:
        """Rule and name, as reports show them."""
        return f"{self.rule}-{self.name}"


TIER_CLAUSES: dict[str, TierClause] = {}
"""Every clause by its ident, in the order of the rules."""


def tier_clause(rule: str, sentence: str, name: str = "") -> Callable[[Check], Check]:
    """Register a function as a clause; its name is the clause's."""

    def add(check: Check) -> Check:
        entry = TierClause(rule, name or check.__name__.replace("_", "-"), sentence, check)
        assert rule in TIER_RULES
        assert entry.ident not in TIER_CLAUSES
        TIER_CLAUSES[entry.ident] = entry
        return check

    return add
