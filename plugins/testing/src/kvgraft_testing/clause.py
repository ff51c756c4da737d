"""Clauses: one normative sentence and the function that checks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from kvgraft.contract import API_VERSION
from kvgraft.errors import ContractViolation
from kvgraft_testing.rules import RULES
from kvgraft_testing.subject import Subject

__all__ = ["CLAUSES", "Clause", "Undecided", "clause", "expect"]

Check = Callable[[Subject], None]
Needs = Callable[[Subject], str | None]


class Undecided(Exception):  # noqa: N818 - an outcome, not an error
    """A clause could not be decided because another rule was broken first; the text says which."""


class Clause(NamedTuple):
    """One thing a component must do.

    Attributes:
        rule: the rule of the contract it is part of.
        name: short name, unique.
        sentence: the condition, in one sentence.
        since: the API version that introduced it; components written for older ones are not
            checked.
        needs: says why the clause does not apply to a component; None if it does.
        check: raises `ContractViolation` if it does not hold.
    """

    rule: str
    name: str
    sentence: str
    since: str
    needs: Needs
    check: Check

    @property
    def ident(self) -> str:
        """Rule and name, as reports show them."""
        return f"{self.rule}-{self.name}"

    def applies(self, subject: Subject) -> str | None:
        """Why it does not apply to the subject; None if it does."""
        if _version(self.since) > _version(subject.plugin.declaration.api_version):
            return f"asked since API {self.since}, the component is written for an older one"
        return self.needs(subject)


_REGISTERED: dict[str, Clause] = {}

CLAUSES: Mapping[str, Clause] = MappingProxyType(_REGISTERED)
"""Every clause by its ident, in the order of the contract's families."""


def _always(subject: Subject) -> str | None:
    return None


def register(entries: Iterable[Clause]) -> None:
    """Add clauses.

    Raises:
        ValueError: a rule that does not exist, a version from the future, or a name used twice.
    """
    for entry in entries:
        if entry.rule not in RULES or entry.ident in _REGISTERED:
            raise ValueError(f"clause {entry.ident}: unknown rule or name used twice")
        if _version(entry.since) > _version(API_VERSION):
            raise ValueError(f"clause {entry.ident}: since {entry.since}, the API is {API_VERSION}")
        _REGISTERED[entry.ident] = entry
    order = list(RULES)
    arranged = sorted(_REGISTERED.values(), key=lambda each: order.index(each.rule))
    _REGISTERED.clear()
    _REGISTERED.update((each.ident, each) for each in arranged)


def clause(
    rule: str, sentence: str, *, since: str = "1.0", needs: Needs = _always
) -> Callable[[Check], Check]:
    """Register a function as a clause; its name is the clause's."""

    def add(check: Check) -> Check:
        name = check.__name__.replace("_", "-")
        register([Clause(rule, name, sentence, since, needs, check)])
        return check

    return add


def expect(condition: object, rule: str, subject: Subject, evidence: str) -> None:
    """Raise `ContractViolation` unless the condition holds."""
    if not condition:
        raise ContractViolation(rule, subject.name, evidence)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
