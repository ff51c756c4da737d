"""Every known-bad component and core is found, under a rule it breaks; legal odd ones pass."""

from __future__ import annotations

import pytest

from ..commands import ROOT
from . import cores_of_requests as _more  # noqa: F401 - fills CORES
from .components import MUTANTS, ComponentMutant
from .cores import CORES
from .killing import check_package, find_in_core, first_failure, wrongly_killed
from .legal import LEGAL


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_component_with_a_defect_is_found_under_its_rule(mutant: ComponentMutant) -> None:
    problem = wrongly_killed(first_failure(mutant.package), mutant.rules)
    assert problem is None, problem


@pytest.mark.long
@pytest.mark.parametrize("name", CORES)
def test_a_core_with_a_defect_is_found_under_its_rule(name: str) -> None:
    problem = wrongly_killed(find_in_core(CORES[name]), CORES[name].rules)
    assert problem is None, problem


@pytest.mark.parametrize("name", LEGAL)
def test_an_unusual_component_that_keeps_the_contract_passes(name: str) -> None:
    bad = [result for result in check_package(LEGAL[name], "dev") if result.bad]
    assert not bad, "\n".join([f"{bad[0].rule}: {bad[0].evidence}", *bad[0].steps])


def test_there_are_enough_mutants_in_every_family() -> None:
    meant = [mutant.rules[0] for mutant in MUTANTS] + [core.rules[0] for core in CORES.values()]
    assert len(meant) >= 40
    assert {rule[0] for rule in meant} >= set("TMILEBRAHP")


def test_the_kill_table_lists_every_mutant() -> None:
    text = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    names = [mutant.name for mutant in MUTANTS]
    names += [name.replace("_", " ") for name in CORES]
    missing = [name for name in [*names, *LEGAL] if name not in text]
    assert not missing, "run `make mutants`"
