"""Looking for a defect with the contract suite, as its users would."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import settings

from kvgraft import Component, Demand, DemandQuery, Everything, Reach, Tier
from kvgraft.errors import PluginError
from kvgraft.packages.registry import Plugin, load_plugin
from kvgraft.transfers import pair_planes
from kvgraft_testing import CLAUSES, Result, Status
from kvgraft_testing.checking import Checker
from kvgraft_testing.machine import machine_for, references, search, setup_for
from kvgraft_testing.machine.drafting import search_drafts

from .cores import CoreMutant
from .packages import Package, paged

__all__ = ["Kill", "check_package", "find_in_core", "first_failure", "wrongly_killed"]

NAME = "mutant"
STEPS = 50
TALKS = 8
"""Conversations with drafts."""


def _private_rows(component: Component, query: DemandQuery) -> Demand:
    del component
    pages = -(-query.total // query.page_size) + 1
    return Demand(pages + query.host_slots, 0, (3,))


ENDED = {
    "commit_hicache_transfers": lambda component, query: None,
    "abort_hicache_transfers": lambda component, query: None,
}
ODD = {
    "hosted": paged(home=Tier.HOST, reach=Reach(Everything())),
    "private": paged(
        reach=Reach(Everything()),
        private={"rows": 7},
        hooks={"budget_contribution": _private_rows},
    ),
    "builder": paged(hooks={"build_hicache_transfers": pair_planes, **ENDED}),
}
"""Correct components of further kinds that a defect in the core may need to show."""


class Kill(NamedTuple):
    """The check that found a defect.

    Attributes:
        rule: the rule that was named.
        by: the clause, or where else it was noticed.
        evidence: the observation.
    """

    rule: str
    by: str
    evidence: str


def first_failure(package: Package) -> Kill | None:
    """The suite's first report: when loading, by a clause, or by the state machine."""
    try:
        plugin = load_plugin(NAME, package.implementation(NAME))
        checker = Checker(plugin, profile="ci")
        checker.subject.mount(1)
    except PluginError as error:
        return Kill(error.rule, "load", str(error))
    for entry in _quick_first():
        result = checker.check(CLAUSES[entry])
        if result.status is Status.FAILED:
            return Kill(result.rule, entry, result.evidence)
    for result in checker.verdict():
        if result.bad:
            return Kill(result.rule, result.clause, result.evidence)
    return None


def _quick_first() -> list[str]:
    """Clauses in an order that puts those of the state machine last."""
    return sorted(CLAUSES, key=lambda ident: ident.endswith("-driven"))


def check_package(package: Package, profile: str = "ci") -> list[Result]:
    """Every clause on a package."""
    plugin: Plugin = load_plugin(NAME, package.implementation(NAME))
    return Checker(plugin, profile=profile).run()


def find_in_core(mutant: CoreMutant) -> Kill | None:
    """The first finding with the defect in the core, in random calls or talks; None if none."""
    kinds = [each for each in references() if each.name.split("_")[1] in mutant.kinds]
    kinds += [
        load_plugin(kind, ODD[kind].implementation(kind)) for kind in mutant.kinds if kind in ODD
    ]
    setup = replace(
        setup_for(kinds),
        shared="share" in mutant.kinds,
        drawn="drawn" in mutant.kinds,
        stored="stored" in mutant.kinds,
    )
    machine = machine_for(setup)
    chosen = settings(derandomize=True, max_examples=mutant.examples, stateful_step_count=STEPS)
    with pytest.MonkeyPatch.context() as patch:
        mutant.put_in(patch)
        found = search(machine, chosen)
        if found is None:
            found, _ = search_drafts(setup, machine.fitting, range(TALKS), frozenset())
    if found is None:
        return None
    return Kill(found.violation.rule, "state machine", found.violation.evidence)


def wrongly_killed(kill: Kill | None, rules: tuple[str, ...]) -> str | None:
    """Why a kill does not count; None if it does."""
    if kill is None:
        return "survived"
    if kill.rule not in rules:
        return f"{kill.by} names {kill.rule}, not {' or '.join(rules)}: {kill.evidence}"
    return None
