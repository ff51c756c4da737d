"""Every known-bad component and core is found, under a rule it breaks; legal odd ones pass."""

from __future__ import annotations

import pytest

from kvgraft.testing import CLAUSES

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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if number % 3 else ())
        for number, name in enumerate(LEGAL)
    ],
)
def test_an_unusual_component_that_keeps_the_contract_passes(name: str) -> None:
    bad = [result for result in check_package(LEGAL[name], "dev") if result.bad]
    assert not bad, "\n".join([f"{bad[0].rule}: {bad[0].evidence}", *bad[0].steps])


def test_there_are_enough_mutants_in_every_family() -> None:
    meant = [mutant.rules[0] for mutant in MUTANTS] + [core.rules[0] for core in CORES.values()]
    assert len(meant) >= 40
    assert {rule[0] for rule in meant} >= set("TMILEBRAHP")


def table() -> list[list[str]]:
    """The rows of `docs/mutants.md`."""
    text = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| c")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_kill_table_has_every_mutant_with_a_rule_that_may_be_named() -> None:
    meant = {("component", mutant.name): mutant.rules for mutant in MUTANTS}
    meant |= {("core", name.replace("_", " ")): core.rules for name, core in CORES.items()}
    rows = table()
    assert [(where, defect) for where, defect, _, _ in rows] == list(meant), "run `make mutants`"
    wrong = [row for row in rows if row[2] not in meant[row[0], row[1]] or row[3] == "survived"]
    assert not wrong, "run `make mutants`"
    drives = {f"{row[2]}-driven" for row in rows}
    assert {row[3] for row in rows} <= {"state machine", "load", *CLAUSES, *drives}


def test_the_kill_table_counts_what_it_lists() -> None:
    text = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    families = sorted({row[2][0] for row in table()})
    assert f"{len(table())} mutants; families named: {' '.join(families)}.\n" in text
    listed = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
    assert listed == list(LEGAL), "run `make mutants`"
