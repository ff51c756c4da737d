"""One example of the state machine: rules run until one ends it, and what ended it is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from kvgraft.errors import ContractViolation
from kvgraft.testing.machine.driver import Driver
from kvgraft.testing.machine.judging import Judge, Stopped
from kvgraft.testing.machine.setups import Setup

__all__ = ["Example", "Failure", "Impossible", "Rule", "picked", "unless_over"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


class Rule(NamedTuple):
    """A rule of the machine that was run: its name and what was drawn for it."""

    name: str
    drawn: dict[str, Any]

    def __str__(self) -> str:
        drawn = ", ".join(f"{name}={value!r}" for name, value in self.drawn.items())
        return f"{self.name}({drawn})"


class Failure(NamedTuple):
    """A rule of the contract that was broken, and how.

    Attributes:
        violation: what was raised.
        steps: the calls that led there, in words.
        rules: the same as rules of the machine, to run them again.
    """

    violation: ContractViolation
    steps: list[str]
    rules: list[Rule]


class Impossible(Exception):  # noqa: N818 - a rule left out, not an error
    """A rule that cannot run now; among rules of Hypothesis' choice there are none."""


def picked(items: Sequence[T], index: int) -> T:
    """One of the items there are.

    Raises:
        Impossible: there is none.
    """
    if not items:
        raise Impossible
    return items[index % len(items)]


def unless_over(function: F) -> F:
    """Run a rule unless the example is over; note what ends it."""

    @wraps(function)
    def call(self: Example, **drawn: Any) -> None:
        if not self.over:
            self.total["steps"] += 1
            self.rules_run.append(Rule(function.__name__, drawn))
            self.until_it_ends(lambda: function(self, **drawn))

    return call  # type: ignore[return-value]


class Example(RuleBasedStateMachine):
    """What all examples share, whatever their rules.

    Attributes:
        setup: the component set; subclasses name it, and what follows.
        fitting: by how much pools are scaled, per page size the components work with.
        ignored: rules of the contract that are not raised.
        total: what all examples of the class did.
        failures: how the last example that failed did.
        driver: the engine, once it is open.
        over: whether this example has ended early.
        rules_run: the rules of this example.
    """

    setup: Setup
    fitting: dict[int, int]
    ignored: frozenset[str]
    total: Counter[str]
    failures: list[Failure]
    driver: Driver

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        self.rules_run: list[Rule] = []
        self.judge = Judge(self.ignored)

    def teardown(self) -> None:
        """End everything and count what happened."""
        try:
            if hasattr(self, "driver") and not self.over:
                self.until_it_ends(self.driver.close)
        finally:
            if hasattr(self, "driver"):
                self.total.update(self.driver.bench.counts)
                self.total.update({f"ignored {k}": n for k, n in self.judge.passed_over.items()})
                self.total["examples"] += 1

    def until_it_ends(self, call: Callable[[], None]) -> None:
        """Make a call; what it raises ends the example, and broken rules are noted."""
        try:
            call()
        except Impossible:
            self.rules_run.pop()
        except Stopped:
            self.over = True
        except ContractViolation as violation:
            self.over = True
            steps = ["open"]
            if hasattr(self, "driver"):
                steps = self.driver.bench.trace.lines()
            self.failures[:] = [Failure(violation, steps, self.rules_run)]
            raise
        except BaseException:
            self.over = True
            raise
