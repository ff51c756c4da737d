"""Every known-bad component and core is found, under a rule it breaks; legal odd ones pass."""

from __future__ import annotations

import pytest

from kvgraft_testing import CLAUSES

from . import cores_of_budgets as _budgets  # noqa: F401 - fills CORES
from . import cores_of_drafts as _drafts  # noqa: F401 - fills CORES
from . import cores_of_events as _events  # noqa: F401 - fills CORES
from . import cores_of_keeping as _keeping  # noqa: F401 - fills CORES
from . import cores_of_newer_parts as _newer  # noqa: F401 - fills CORES
from . import cores_of_points as _points  # noqa: F401 - fills CORES
from . import cores_of_refusals as _refusals  # noqa: F401 - fills CORES
from . import cores_of_requests as _more  # noqa: F401 - fills CORES
from . import cores_of_sharing as _sharing  # noqa: F401 - fills CORES
from . import cores_of_storing as _storing  # noqa: F401 - fills CORES
from .by_tests import HEADING, TABLE
from .components import MUTANTS, ComponentMutant
from .components_held_out import COMPONENTS_HELD_OUT
from .cores import CORES
from .cores_held_out import CORES_HELD_OUT
from .killing import check_package, find_in_core, first_failure, wrongly_killed
from .legal import LEGAL
from .survivors import SURVIVORS

QUICK = (
    "a_grid_is_never_thinned",
    "a_point_lies_a_page_early",
    "pages_are_published_after_they_went",
    "points_are_counted_twice_in_the_demand",
    "left_behind_data_goes_last",
    "an_arrival_is_reported_twice",
    "an_observer_that_raises_takes_the_cache_down",
    "a_match_ignores_gaps",
    "a_request_waits_for_pages_without_end",
    "a_request_that_was_deferred_is_not_matched_again",
    "more_is_pending_than_is_shared",
    "an_extent_is_leased_twice",
    "pages_of_drafts_are_shared",
)
"""Cores found within seconds: data left behind, matches, events, waits, budgets, drafts.

Each version of Hypothesis draws other calls: the oldest that is allowed finds them as well.
"""

FIRST = {mutant.rules[0]: mutant.name for mutant in reversed(MUTANTS)}
"""By rule, the first component that breaks it: every run looks at these."""


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(each, marks=() if FIRST[each.rules[0]] == each.name else pytest.mark.long)
        for each in MUTANTS
    ],
    ids=lambda mutant: mutant.name,
)
def test_a_component_with_a_defect_is_found_under_its_rule(mutant: ComponentMutant) -> None:
    problem = wrongly_killed(first_failure(mutant.package), mutant.rules)
    assert problem is None, problem


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", QUICK)
def test_a_core_with_a_defect_that_shows_at_once_is_found(name: str) -> None:
    problem = wrongly_killed(find_in_core(CORES[name]), CORES[name].rules)
    assert problem is None, problem


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(CORES) - set(QUICK)))
def test_a_core_with_a_defect_is_found_under_its_rule(name: str) -> None:
    problem = wrongly_killed(find_in_core(CORES[name]), CORES[name].rules)
    assert problem is None, problem


@pytest.mark.parametrize("name", sorted(set(CORES) - set(QUICK)))
def test_the_line_that_a_bad_core_changes_is_there(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CORES[name].put_in(monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", LEGAL)
def test_an_unusual_component_that_keeps_the_contract_passes(name: str) -> None:
    bad = [result for result in check_package(LEGAL[name], "dev") if result.bad]
    assert not bad, "\n".join([f"{bad[0].rule}: {bad[0].evidence}", *bad[0].steps])


def test_there_are_enough_mutants_in_every_family() -> None:
    meant = [mutant.rules[0] for mutant in MUTANTS] + [core.rules[0] for core in CORES.values()]
    assert len(meant) >= 40
    assert {rule[0] for rule in meant} >= set("TMILEBRAHP")


def sections() -> tuple[str, str]:
    """`docs/mutants.md`: the suite's own mutants, and those written apart from it."""
    text, _, _ = TABLE.read_text(encoding="utf-8").partition(HEADING)
    own, _, apart = text.partition("\n## Written apart from the suite\n")
    return own, apart


def table(text: str) -> list[list[str]]:
    """The rows of a section."""
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| c")]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_kill_table_has_every_mutant_with_a_rule_that_may_be_named() -> None:
    meant = {("component", mutant.name): mutant.rules for mutant in MUTANTS}
    meant |= {("core", name.replace("_", " ")): core.rules for name, core in CORES.items()}
    rows = table(sections()[0])
    assert [(where, defect) for where, defect, _, _ in rows] == list(meant), "run `make mutants`"
    wrong = [row for row in rows if row[2] not in meant[row[0], row[1]] or row[3] == "survived"]
    assert not wrong, "run `make mutants`"
    drives = {f"{row[2]}-driven" for row in rows}
    assert {row[3] for row in rows} <= {"state machine", "load", *CLAUSES, *drives}


def test_the_kill_table_counts_its_own_rows() -> None:
    text = sections()[0]
    families = sorted({row[2][0] for row in table(text)})
    assert f"{len(table(text))} mutants; families named: {' '.join(families)}.\n" in text
    listed = [line.removeprefix("- ") for line in text.splitlines() if line.startswith("- ")]
    assert listed == list(LEGAL), "run `make mutants`"


def test_the_kill_table_has_every_mutant_written_apart_from_the_suite() -> None:
    meant = {("component", mutant.name): mutant.rules for mutant in COMPONENTS_HELD_OUT}
    meant |= {("core", name): core.rules for name, core in CORES_HELD_OUT.items()}
    rows = table(sections()[1])
    assert [(where, defect) for where, defect, _, _ in rows] == list(meant), "run `make mutants`"
    alive = {row[1] for row in rows if row[2] not in meant[row[0], row[1]]}
    assert alive == set(SURVIVORS), "run `make mutants`"


def test_the_rates_are_those_of_the_rows_listed() -> None:
    text = sections()[1]
    for where in ("component", "core"):
        own = [row for row in table(text) if row[0] == where]
        killed = sum(row[1] not in SURVIVORS for row in own)
        assert f"{killed} of {len(own)} {where}s ({100 * killed / len(own):.0f} %)" in text
