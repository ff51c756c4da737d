"""One example of the state machine: rules run until one ends it, and the cause is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from hypothesis.stateful import RuleBasedStateMachine

from kvgraft.errors import ContractViolation
from kvgraft_testing.machine.harness import Harness
from kvgraft_testing.machine.judging import Judge, Stopped
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.setups import Setup

__all__ = ["Began", "Example", "Failure", "Impossible", "Rule", "picked", "unless_over"]

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., None])


class Rule(NamedTuple):
    """A rule of the machine that was run.

    Attributes:
        name: its name.
        drawn: the values drawn for it.
        label: a number that it keeps when others are left out.
        picks: its choices, in order: requests by the label of the rule that began them and their
            place among those it began.
    """

    name: str
    drawn: dict[str, Any]
    label: int = -1
    picks: tuple[object, ...] = ()

    def __str__(self) -> str:
        drawn = ", ".join(f"{name}={value!r}" for name, value in self.drawn.items())
        return f"{self.name}({drawn})"


class Failure(NamedTuple):
    """A rule of the contract that was broken, and how.

    Attributes:
        violation: the error raised.
        steps: the calls that led there, in words.
        rules: the same as rules of the machine, to run them again.
    """

    violation: ContractViolation
    steps: list[str]
    rules: list[Rule]


class Impossible(Exception):  # noqa: N818 - a rule left out, not an error
    """A rule that cannot run now; Hypothesis never chooses one."""


class Began(NamedTuple):
    """A request: the label of the rule that began it, and its place among those."""

    label: int
    place: int


class _Picking:
    """One rule's choices: the same as when it ran first."""

    def __init__(self, began: Mapping[str, Began], planned: tuple[object, ...]) -> None:
        self.began = began
        self.planned = planned
        self.picks: list[object] = []
        self.at = 0

    def pick(self, items: Sequence[T], index: int) -> T:
        names = [self._name(item) for item in items]
        at = index % len(items)
        wanted = self.planned[len(self.picks)] if len(self.picks) < len(self.planned) else None
        if wanted is not None and wanted in names:
            at = names.index(wanted)
        elif isinstance(wanted, Began):
            raise Impossible
        self.picks.append(names[at])
        self.at = at
        return items[at]

    def _name(self, item: object) -> object:
        if isinstance(item, Live):
            return self.began.get(item.name)
        return item if isinstance(item, tuple) else None


PICKING: ContextVar[_Picking | None] = ContextVar("PICKING", default=None)
"""The choices of the rule that runs."""


def picked(items: Sequence[T], index: int) -> T:
    """One of the given items.

    Raises:
        Impossible: there is none, or not the one that a shrunk example needs.
    """
    if not items:
        raise Impossible
    picking = PICKING.get()
    return items[index % len(items)] if picking is None else picking.pick(items, index)


def unless_over(function: F) -> F:
    """Run a rule unless the example is over; note an error that ends it."""

    @wraps(function)
    def call(self: Example, **drawn: Any) -> None:
        if not self.over:
            self.total["steps"] += 1
            self.run_rule(Rule(function.__name__, drawn), lambda: function(self, **drawn))

    return call  # type: ignore[return-value]


class Example(RuleBasedStateMachine):
    """The common part of all examples.

    Attributes:
        setup: the component set; subclasses name it, and the following.
        variants: the setups of which an example draws one; the first is the set as it is.
        fitting: by how much pools are scaled, per page size the components work with.
        ignored: rules of the contract that are not raised.
        total: counts of all examples of the class.
        failures: how the last example that failed did.
        harness: the engine, once it is open.
        over: whether this example has ended early.
        rules_run: the rules of this example.
        planned: the next rule of a longer example; None if there is none.
        n_rules: how many were run.
        began: which rule began a request, by the request's name.
    """

    setup: Setup
    variants: tuple[Setup, ...]
    fitting: dict[int, int]
    ignored: frozenset[str]
    total: Counter[str]
    failures: list[Failure]
    harness: Harness

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        self.rules_run: list[Rule] = []
        self.planned: Rule | None = None
        self.n_rules = 0
        self.began: dict[str, Began] = {}
        self.judge = Judge(self.ignored)

    def teardown(self) -> None:
        """End all requests and add up the counts."""
        try:
            if hasattr(self, "harness") and not self.over:
                self.until_it_ends(self.harness.close)
        finally:
            if hasattr(self, "harness"):
                self.total.update(self.harness.bench.counts)
                self.total.update({f"ignored {k}": n for k, n in self.judge.passed_over.items()})
                self.total["examples"] += 1

    def run_rule(self, rule: Rule, call: Callable[[], None]) -> None:
        """Run a rule and note its picks and requests, so that it can be run among fewer."""
        planned, self.planned = self.planned, None
        if planned is None:
            planned = Rule(rule.name, rule.drawn, self.n_rules)
        self.n_rules += 1
        picking = _Picking(self.began, planned.picks)
        self.rules_run.append(planned)
        token = PICKING.set(picking)
        try:
            self.until_it_ends(call)
        finally:
            PICKING.reset(token)
            if self.rules_run and self.rules_run[-1] is planned:
                picks, drawn = tuple(picking.picks), rule.drawn
                if len(picks) == 1:  # calling it with the drawn values picks the same
                    drawn = {**drawn, "index": picking.at}
                self.rules_run[-1] = Rule(rule.name, drawn, planned.label, picks)
            new = [each for each in self._live() if each.name not in self.began]
            for place, live in enumerate(new):
                self.began[live.name] = Began(planned.label, place)

    def _live(self) -> list[Live]:
        return self.harness.live if hasattr(self, "harness") else []

    def until_it_ends(self, call: Callable[[], None]) -> None:
        """Make a call; an error ends the example, and broken rules are noted."""
        try:
            call()
        except Impossible:
            self.rules_run.pop()
        except Stopped:
            self.over = True
        except ContractViolation as violation:
            self.over = True
            steps = ["open"]
            if hasattr(self, "harness"):
                steps = self.harness.bench.trace.lines()
            self.failures[:] = [Failure(violation, steps, self.rules_run)]
            raise
        except BaseException:
            self.over = True
            raise
