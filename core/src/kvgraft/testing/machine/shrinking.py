"""Making a failure readable: fewer rules, smaller values, the same rule of the contract broken.

Rules are left out as long as the failure stays, halves first, then values are made smaller one at
a time. That runs whole examples without drawing anything, which takes a tenth of the time that
Hypothesis' own shrinking does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft.testing.machine.examples import Example, Failure, Rule

__all__ = ["shrunk"]

LONGEST_S = 15.0
"""Seconds of computing after which the smallest failure found so far has to do."""

KEPT = frozenset({"device", "host", "tier"})
"""What is drawn that has no smaller value."""

OPTIONAL = frozenset({"load", "namespace", "chunk", "limit"})
"""What is drawn that is simplest where it is left out."""


def shrunk(machine: type[Example], failure: Failure) -> Failure:
    """The smallest failure found that breaks the same rule; the given one if it does not repeat."""
    return _Shrinking(machine, failure).run()


class _Shrinking:
    def __init__(self, machine: type[Example], failure: Failure) -> None:
        self.machine = machine
        self.best = failure
        self.deadline = time.process_time() + LONGEST_S

    def run(self) -> Failure:
        if not self._fails(self.best.rules):
            return self.best
        size = -1
        while size != self._size() and not self._late():
            size = self._size()
            self._leave_out()
            self._make_smaller()
        return self.best

    def _size(self) -> int:
        return len(self.best.rules) + len(repr(self.best.rules))

    def _late(self) -> bool:
        return time.process_time() > self.deadline

    def _fails(self, rules: list[Rule]) -> bool:
        """Run some rules on a fresh cache; whether they break the same rule of the contract."""
        if self._late():
            return False
        machine = self.machine()
        machine.failures = []
        machine.total = type(machine.total)()
        try:
            for rule in rules:
                getattr(machine, rule.name)(**rule.drawn)
            machine.teardown()
        except ContractViolation as violation:
            if violation.rule == self.best.violation.rule:
                self.best = machine.failures[0]
                return True
        return False

    def _leave_out(self) -> None:
        """Fewer rules; the first one opens the cache and stays."""
        width = len(self.best.rules) // 2
        while width:
            start = len(self.best.rules) - width
            while start > 0:
                rules = self.best.rules
                self._fails(rules[:start] + rules[start + width :])
                start = min(start, len(self.best.rules)) - width
            width //= 2

    def _make_smaller(self) -> None:
        """Smaller values, one at a time."""
        for at in range(len(self.best.rules)):
            names = self.best.rules[at].drawn if at < len(self.best.rules) else ()
            for name in set(names) - KEPT:
                while at < len(self.best.rules) and any(self._smaller(at, name)):
                    pass

    def _smaller(self, at: int, name: str) -> Iterator[bool]:
        rules = self.best.rules
        drawn = rules[at].drawn
        if name not in drawn:
            return
        for value in self._candidates(name, drawn[name]):
            if value == drawn[name]:
                continue
            changed = Rule(rules[at].name, {**drawn, name: value})
            yield self._fails([*rules[:at], changed, *rules[at + 1 :]])

    def _candidates(self, name: str, value: Any) -> Iterable[Any]:
        if name == "page_size":
            return [size for size in sorted(self.machine.fitting) if size < value]
        return (None,) if name in OPTIONAL else simpler(value)


def simpler(value: Any) -> Iterator[Any]:
    """Values to try instead of one, simplest first."""
    if isinstance(value, bool):
        if value:
            yield False
    elif isinstance(value, int):
        yield from sorted({0, value // 2, value - 1} - {value, -1})
    elif isinstance(value, (tuple, list)):
        if value:
            yield value[:0]
            yield value[: len(value) // 2]
            yield value[:-1]
    elif isinstance(value, WritePolicy):
        yield WritePolicy.WRITE_THROUGH
