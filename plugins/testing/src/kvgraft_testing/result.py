"""Results of clauses."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["BROKEN", "Result", "Status"]


class Status(str, enum.Enum):
    """The outcome of a clause."""

    PASSED = "passed"
    FAILED = "failed"
    EXPECTED_FAILURE = "expected failure"
    UNEXPECTED_PASS = "unexpected pass"
    UNDECIDED = "undecided"
    NOT_APPLICABLE = "not applicable"


BROKEN = frozenset({Status.FAILED, Status.EXPECTED_FAILURE})
"""The outcomes of a clause whose rule is broken."""

BAD = frozenset({Status.FAILED, Status.UNEXPECTED_PASS})


@dataclass(frozen=True, slots=True)
class Result:
    """One clause's outcome for one component.

    Attributes:
        component: the component's name.
        clause: the clause's ident.
        rule: the rule that was checked; in a failure, the broken one. Empty if the component cannot
            be loaded for a reason without a rule.
        sentence: the condition checked.
        status: how it ended.
        evidence: the contrary observation, or why it was undecided or not applicable.
        steps: the shrunk calls that lead to a failure of the state machine, in order.
        seconds: how long it took.
    """

    component: str
    clause: str
    rule: str
    sentence: str
    status: Status
    evidence: str = ""
    steps: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        """Whether it makes the whole check fail."""
        return self.status in BAD

    @property
    def heading(self) -> str:
        """The rule's id and its text."""
        return f"{self.rule}: {self.sentence}" if self.rule else self.sentence

    def as_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {**asdict(self), "status": self.status.value, "steps": list(self.steps)}

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> Result:
        """The result with the fields of `as_json`."""
        steps = tuple(fields["steps"])
        return cls(**{**fields, "status": Status(fields["status"]), "steps": steps})
