"""Making a failure readable: fewer rules, smaller values, the same rule of the contract broken.

Whole requests are left out as long as the failure stays, then namespaces, then rules, halves
first; rules that do much are tried as one that does less, scenes as the plain calls they make;
then values are made smaller one at a time. The remaining rules go on picking the same requests.
That runs whole examples without drawing anything, which takes a tenth of the time that Hypothesis'
own shrinking does.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft_testing.machine.examples import Began, Example, Failure, Rule
from kvgraft_testing.machine.unrolling import SCENES, unrolled

__all__ = ["shrunk"]

LONGEST_S = 15.0
"""Seconds of computing after which the smallest failure so far is taken."""

KEPT = frozenset({"device", "host", "states", "tier"})
"""Drawn arguments that have no smaller value."""

OPTIONAL = frozenset({"load", "namespace", "chunk", "limit"})
"""Drawn arguments that are simplest when left out."""


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
            self._leave_out_requests()
            self._merge_namespaces()
            self._leave_out()
            self._do_less()
            self._unroll()
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
        machine = self._fresh()
        try:
            for rule in rules:
                machine.planned = rule
                getattr(machine, rule.name)(**rule.drawn)
            machine.teardown()
        except ContractViolation as violation:
            if violation.rule == self.best.violation.rule:
                self.best = machine.failures[0]
                return True
        except Exception:  # noqa: BLE001 - smaller values may be some that no rule ever draws
            return False
        return False

    def _fresh(self) -> Example:
        machine = self.machine()
        machine.failures = []
        machine.total = type(machine.total)()
        return machine

    def _leave_out_requests(self) -> None:
        """No request of some rule, from the first to the last, and nothing that is done to it."""
        for label in [rule.label for rule in self.best.rules[1:]]:
            self._fails([rule for rule in self.best.rules if not _is_about(rule, label)])

    def _merge_namespaces(self) -> None:
        """Everything in one namespace, or nothing of one of them."""
        for name in {rule.drawn.get("namespace") for rule in self.best.rules} - {None}:
            rules = self.best.rules
            gone = {rule.label for rule in rules if rule.drawn.get("namespace") == name}
            if self._fails([r for r in rules if not any(_is_about(r, label) for label in gone)]):
                continue
            self._fails([_with(r, namespace=None) if r.label in gone else r for r in rules])

    def _do_less(self) -> None:
        """A request that is only begun, or taken some of its way, instead of served whole."""
        for at in range(len(self.best.rules)):
            rule = self.best.rules[at] if at < len(self.best.rules) else None
            if rule is None or rule.name != "serve" or rule.drawn["on"]:
                continue
            drawn = {name: rule.drawn[name] for name in ("stem", "length", "tail", "chunk")}
            drawn |= {"namespace": None, "reserve": len(rule.drawn["output"])}
            for along in (0, 1, 2, 3):
                less = rule._replace(name="begin", drawn={**drawn, "along": along})
                if self._fails([*self.best.rules[:at], less, *self.best.rules[at + 1 :]]):
                    break

    def _unroll(self) -> None:
        """Plain calls instead of a scene; those that play no part are left out."""
        for rule in [rule for rule in self.best.rules if rule.name in SCENES]:
            rules = self.best.rules
            at = next((n for n, each in enumerate(rules) if each.label == rule.label), None)
            if at is None or self._late():
                continue
            if self._fails(unrolled(self._fresh(), rules, at)):
                self._leave_out_requests()
                self._leave_out()

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
            changed = _with(rules[at], **{name: value})
            yield self._fails([*rules[:at], changed, *rules[at + 1 :]])

    def _candidates(self, name: str, value: Any) -> Iterable[Any]:
        if name == "page_size":
            return [size for size in sorted(self.machine.fitting) if size < value]
        return (None,) if name in OPTIONAL else simpler(value)


def _is_about(rule: Rule, label: int) -> bool:
    """Whether it is the rule with the label, or does something to a request which that began."""
    picked = (pick.label for pick in rule.picks if isinstance(pick, Began))
    return rule.label == label or label in picked


def _with(rule: Rule, **drawn: Any) -> Rule:
    return rule._replace(drawn={**rule.drawn, **drawn})


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
