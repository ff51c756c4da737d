"""Runs the state machine: one call, its results as values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from os import urandom

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import Flaky
from hypothesis.stateful import run_state_machine_as_test

from kvgraft.errors import ContractViolation, PluginError
from kvgraft_testing.machine.constants import constants_of_modules_left_out
from kvgraft_testing.machine.drafting import search_drafts
from kvgraft_testing.machine.examples import Example, Failure, Rule
from kvgraft_testing.machine.fitting import quiet_log
from kvgraft_testing.machine.machine import machine_for
from kvgraft_testing.machine.setups import Setup
from kvgraft_testing.machine.shrinking import shrunk

__all__ = ["Drive", "drive", "quiet_log", "search"]

DEFAULT = hypothesis.settings(max_examples=60, stateful_step_count=50, derandomize=True)
"""Settings of `drive`: every run is the same."""

EXAMPLES_A_TALK = 10
"""Examples of the state machine for each conversation with drafts."""

DECLARED = frozenset({"P8", "H7"})
"""Rules that a component breaks if it does not act as it declares, with any options."""


@dataclass(frozen=True)
class Drive:
    """A run of the state machine, and the rule it found broken.

    Attributes:
        counts: calls and outcomes by name. Among them `"examples"`, `"steps"` (rules run, each
            one or several calls), `"begin"`, `"admit"`, and how often requests were `"admitted"`,
            `"deferred"` and `"never fits"`: where none is admitted, nothing was tested.
        violation: the first rule of the contract found broken; None if none was.
        steps: the calls that led there, as few and as small as possible.
        rules: the same as rules of the machine; calling them in order breaks the rule again.
    """

    counts: Counter[str]
    violation: ContractViolation | None = None
    steps: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()

    def then(self, other: Drive) -> Drive:
        """Both runs as one; the first violation counts."""
        first = self if self.violation is not None else other
        return Drive(self.counts + other.counts, first.violation, first.steps, first.rules)


def drive(
    subject: Setup,
    *,
    settings: hypothesis.settings | None = None,
    ignored: frozenset[str] = frozenset(),
) -> Drive:
    """Drive components through the real core, in random order, against a brute-force model.

    Nothing is printed and nothing stored. A broken rule does not escape as an exception.

    Args:
        subject: the component set, see `setup_for`.
        settings: how many examples of how many steps, and whether they are the same each time.
        ignored: rules that are known to be broken; they are counted and passed over.

    Raises:
        ConfigError: the components refuse all sizes.
        PluginError: a component refuses its options.
    """
    try:
        machine = machine_for(subject, ignored)
    except ContractViolation as violation:
        return Drive(Counter(), violation, (f"open {subject.name}",))
    except PluginError as error:
        if error.rule not in DECLARED:
            raise
        broken = ContractViolation(error.rule, error.plugin, error.reason)
        return Drive(Counter(), broken, (f"open {subject.name}",))
    settings = settings if settings is not None else DEFAULT
    failure = search(machine, settings)
    counts = Counter(machine.total)
    if failure is None:
        n = max(1, settings.max_examples // EXAMPLES_A_TALK)
        seeds: Sequence[object] = (
            range(n) if settings.derandomize else [urandom(8) for _ in range(n)]
        )
        failure, more = search_drafts(subject, machine.fitting, seeds, ignored)
        counts += more
        if failure is None:
            return Drive(counts)
        return Drive(counts, failure.violation.with_traceback(None), tuple(failure.steps))
    with quiet_log():
        failure = shrunk(machine, failure)
    broken = failure.violation.with_traceback(None)
    return Drive(counts, broken, tuple(failure.steps), tuple(failure.rules))


def search(machine: type[Example], settings: hypothesis.settings) -> Failure | None:
    """The first example that breaks a rule, not shrunk; None if none does."""
    chosen = hypothesis.settings(
        settings,
        deadline=None,
        database=None,
        print_blob=False,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    machine.failures.clear()
    try:
        with quiet_log(), constants_of_modules_left_out():
            run_state_machine_as_test(machine, settings=chosen)
    except ContractViolation:
        return machine.failures[0]
    except Flaky as flaky:
        if machine.failures:
            return machine.failures[0]
        said = f"the same calls had another outcome: {' '.join(str(flaky).split())}"
        return Failure(ContractViolation("D1", None, said), [], [])
    return None
