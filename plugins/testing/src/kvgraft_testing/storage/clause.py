"""Clauses of a storage backend, one sentence each."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvgraft_storage import Capabilities
from kvgraft_testing.storage.subject import StorageSubject

__all__ = ["STORAGE_CLAUSES", "StorageClause", "storage_clause"]

Check = Callable[[StorageSubject], None]


class StorageClause(NamedTuple):
    """One clause.

    Attributes:
        rule: the rule of the contract it is part of.
        name: unique.
        sentence: the condition checked.
        needs: the capability it is about; empty if it applies to all.
        check: raises `ContractViolation` if it does not hold.
    """

    rule: str
    name: str
    sentence: str
    needs: str
    check: Check

    @property
    def ident(self) -> str:
        """Rule and name, as reports show them."""
        return f"{self.rule}-{self.name}"

    def applies(self, capabilities: Capabilities) -> bool:
        """Whether the backend claims the clause's capability."""
        return not self.needs or bool(getattr(capabilities, self.needs))


STORAGE_CLAUSES: dict[str, StorageClause] = {}
"""Every clause by its ident."""


def storage_clause(rule: str, sentence: str, needs: str = "") -> Callable[[Check], Check]:
    """Register a function as a clause; its name is the clause's."""

    def add(check: Check) -> Check:
        name = check.__name__.replace("_", "-")
        entry = StorageClause(rule, name, sentence, needs, check)
        assert entry.ident not in STORAGE_CLAUSES
        STORAGE_CLAUSES[entry.ident] = entry
        return check

    return add
