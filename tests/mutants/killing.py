"""Looking for a defect with the contract suite, as its users would."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.errors import PluginError
from kvgraft.registry import Plugin, load_plugin
from kvgraft.testing import CLAUSES, Result, Status
from kvgraft.testing.checking import Checker

from .packages import Package

__all__ = ["Kill", "check_package", "first_failure"]

NAME = "mutant"


class Kill(NamedTuple):
    """What found a defect.

    Attributes:
        rule: the rule that was named.
        by: the clause, or where else it was noticed.
        evidence: what was seen.
    """

    rule: str
    by: str
    evidence: str


def first_failure(package: Package) -> Kill | None:
    """What the suite reports first: when loading, by a clause, or by the state machine."""
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
