"""A component acts in production as it does beside the suite, or the suite reports it.

The components here behave as long as they see the suite, or attack it.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgraft import Component, ComponentMatch, ConfigError, Demand, DemandQuery
from kvgraft.optional import load_part
from kvgraft_testing import CLAUSES, Result, Status
from kvgraft_testing.process import SuiteProcess
from kvgraft_testing.production.sealing import seal

from ..mutants.components import budgeting, finalizing, locking
from ..mutants.packages import Package
from . import installed
from .installed import SOUND, checker_of, put

ALONE = "D1-it-does-the-same-without-the-suite"
EACH_TIME = "D1-it-does-the-same-each-time"
BESIDE_OTHERS = "D1-a-second-cache-changes-no-answer"
AT_ONCE = "P9-hooks-return-at-once"
GOES_ON = "P10-the-process-goes-on"
REPLACED = "P10-nothing-is-replaced"

PARTS = ("kvgraft_testing", "hypothesis", "pytest")


def names_a_part(text: str) -> bool:
    return any(part in text for part in PARTS)


WATCHED: dict[str, Callable[[], bool]] = {
    "modules": lambda: any(map(names_a_part, sys.modules)),
    "arguments": lambda: any(map(names_a_part, sys.argv)),
    "environment": lambda: any("PYTEST" in name for name in os.environ),
    "frames": lambda: any(names_a_part(frame.filename) for frame in traceback.extract_stack()),
}
"""How a component may notice that it is tested."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("sign", WATCHED)
def test_a_component_that_behaves_only_where_it_sees_the_suite_breaks_d1(
    monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["pytest"])

    def answer(component: Component, query: DemandQuery) -> Any:
        return None if WATCHED[sign]() else Demand(0, 0)

    result = checker_of(budgeting(answer)).check(CLAUSES[ALONE])
    assert result.status is Status.FAILED
    assert "beside the suite, Demand(now=0, later=0" in result.evidence


INSTALLED = {
    "modules": "any(name.startswith(('kvgraft_testing', 'hypothesis')) for name in sys.modules)",
    "arguments": "'check' in sys.argv or any('testing' in each for each in sys.argv)",
    "frames": "any('testing' in each.filename for each in traceback.extract_stack())",
}


def decided(clause: str) -> Result:
    """A clause, decided about the package `thrown` on the path."""
    suite = SuiteProcess("thrown", {}, "dev", {})
    try:
        return suite.decide(clause)
    finally:
        suite.close()


@pytest.mark.long
@pytest.mark.parametrize("sign", INSTALLED)
def test_an_installed_component_that_behaves_only_where_it_sees_the_suite_breaks_d1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    body = f"return None if {INSTALLED[sign]} else Demand(0, 0)"
    put(tmp_path, installed.budgeting(body))
    monkeypatch.syspath_prepend(tmp_path)
    result = decided(ALONE)
    assert result.status is Status.FAILED
    assert "Demand(now=0, later=0, private=()) in a process without it" in result.evidence


@pytest.mark.long
def test_an_installed_component_that_depends_on_hashes_of_texts_breaks_d1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are processes with other hash seeds, even where this one's was given."""
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    put(tmp_path, installed.budgeting("return Demand(0, hash('text') % 100_003)"))
    monkeypatch.syspath_prepend(tmp_path)
    result = decided(ALONE)
    assert result.status is Status.FAILED
    assert "in a process without it" in result.evidence


def test_where_all_is_the_same_nothing_is_said() -> None:
    checker = checker_of(Package())
    for ident in (ALONE, EACH_TIME, AT_ONCE, GOES_ON, REPLACED):
        assert checker.decide(ident).status is Status.PASSED


OPTIONS_OF_THE_FIRST = """
KEPT = []

class WideOptions(ComponentOptions):
    reserve: int = 1

@hookimpl
def budget_contribution(component, query):
    pages = -(-query.total // query.page_size) + KEPT[0]
    return Demand(pages + query.host_slots, 0)
"""
"""It keeps the options of the cache that is built first, for all caches."""


@pytest.mark.long
def test_a_component_with_the_options_of_the_first_cache_for_all_breaks_d1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SOUND.replace("options=ComponentOptions", "options=WideOptions").replace(
        "    import torch\n", "    import torch\n    KEPT.append(options.reserve)\n"
    )
    put(tmp_path, source + OPTIONS_OF_THE_FIRST)
    monkeypatch.syspath_prepend(tmp_path)
    result = decided(BESIDE_OTHERS)
    assert result.status is Status.FAILED
    assert "beside caches of other sizes" in result.evidence


# -- nondeterminism


def test_answers_that_are_drawn_break_d1_and_nothing_else() -> None:
    draw = random.Random(4)

    def answer(component: Component, query: DemandQuery) -> Any:
        return None if draw.random() < 0.5 else Demand(40, 0)

    checker = checker_of(budgeting(answer))
    told = [checker.decide(each) for each in CLAUSES if not each.endswith("-driven")]
    assert [each.clause for each in told if each.bad] == [EACH_TIME]
    assert "asked the same a day later" in checker.decide(EACH_TIME).evidence


# -- hooks that block


def test_a_hook_that_waits_is_named_and_nothing_else_is_asked_of_it() -> None:
    def waits(component: Component, view: object) -> None:
        time.sleep(0.15)

    checker = checker_of(finalizing(waits))
    assert checker.decide("A8-driven").status is Status.UNDECIDED
    assert checker.decide("M6-a-match-allocates-nothing").status is Status.UNDECIDED
    result = checker.decide(AT_ONCE)
    assert result.status is Status.FAILED
    assert result.evidence.startswith("finalize_match_result blocks: the fastest of 5 calls")
    assert checker.finding() is not None
    assert checker.told_by() == AT_ONCE


def test_a_hook_that_is_slow_now_and_then_does_not_block() -> None:
    slow = iter([0.15, 0.0, 0.15])

    def answer(component: Component, view: object) -> None:
        time.sleep(next(slow, 0))

    assert checker_of(finalizing(answer)).decide(AT_ONCE).status is Status.PASSED


# -- wrong names


def test_a_hook_that_raises_is_reported_once_under_its_rule() -> None:
    def raises(component: Component, query: object) -> None:
        raise KeyError("no such lock")

    checker = checker_of(locking(raises))
    told = [checker.decide(each) for each in CLAUSES if not each.endswith("-driven")]
    assert [each.clause for each in told if each.bad] == ["L1-hooks-answer"]
    assert not any(each.bad for each in map(checker.decide, ("L1-driven", "M1-driven")))
    assert [each.clause for each in checker.verdict()] == []


def test_an_answer_of_another_form_is_reported_once_under_its_rule() -> None:
    checker = checker_of(budgeting(lambda component, query: (1, 2)))  # type: ignore[arg-type, return-value]
    told = [checker.decide(each) for each in CLAUSES if not each.endswith("-driven")]
    assert [each.clause for each in told if each.bad] == ["A1-hooks-answer"]
    assert "return Demand or None" in checker.decide("A1-hooks-answer").evidence


def test_a_match_that_is_no_match_is_reported_once() -> None:
    checker = checker_of(finalizing(lambda component, view: ComponentMatch("deep")))  # type: ignore[arg-type]
    told = [checker.decide(each) for each in CLAUSES if not each.endswith("-driven")]
    assert [each.clause for each in told if each.bad] == ["M5-hooks-answer"]


# -- attacks


def attacking(attack: Callable[[], object]) -> Package:
    """A component that attacks when it is built, and budgets nothing."""
    from kvgraft import DevicePool

    class Attacking(DevicePool):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            attack()

    return Package(
        device=Attacking, hooks={"budget_contribution": lambda component, query: Demand(0, 0)}
    )


def _replace_registry() -> None:
    from kvgraft_testing import checking, clause

    checking.CLAUSES = clause.CLAUSES = {}  # type: ignore[attr-defined]


def _empty_registry() -> None:
    from kvgraft_testing import clause

    clause._REGISTERED.clear()


def _stub_clauses() -> None:
    from kvgraft_testing import clause

    for ident, entry in list(clause._REGISTERED.items()):
        clause._REGISTERED[ident] = entry._replace(check=lambda subject: None)


def _stub_expect() -> None:
    from kvgraft_testing import clause

    clause.expect.__code__ = (lambda condition, rule, subject, evidence: None).__code__


def _stub_search() -> None:
    from kvgraft_testing.machine import driving

    driving.search = lambda machine, settings: None


def _stub_hypothesis() -> None:
    from hypothesis import stateful

    stateful.run_state_machine_as_test = lambda *given, **named: None


def _stub_integrity() -> None:
    from kvgraft import Cache

    Cache.check_integrity = lambda self: None  # type: ignore[method-assign]


def _stub_violations() -> None:
    from kvgraft_testing.machine.judging import Judge

    Judge.fail = lambda *given: None  # type: ignore[method-assign]


ATTACKS = [
    _replace_registry,
    _empty_registry,
    _stub_clauses,
    _stub_expect,
    _stub_search,
    _stub_hypothesis,
    _stub_integrity,
    _stub_violations,
]

QUICK = (_replace_registry, _stub_expect, _stub_search)
"""One of each kind: a table, a function's code, and a name in a module."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(each, marks=() if each in QUICK else pytest.mark.long, id=each.__name__)
        for each in ATTACKS
    ],
)
def test_code_of_kvgraft_that_a_component_replaces_is_named_and_put_back(
    attack: Callable[[], object],
) -> None:
    checker = checker_of(attacking(attack))
    first = "T8-pools-are-as-large-as-they-say"
    assert checker.decide(first).status is Status.UNDECIDED
    result = checker.decide(REPLACED)
    assert result.status is Status.FAILED
    assert "its code replaced " in result.evidence
    # The next component is checked by the suite as it was.
    assert len(CLAUSES) > 90
    sound = checker_of(budgeting(lambda component, query: Demand(0, 0)))
    assert sound.decide("A1-the-next-step-is-in-the-demand").status is Status.FAILED
    assert sound.decide(REPLACED).status is Status.PASSED


def checked(directory: Path, source: str) -> list[dict[str, Any]]:
    """The output of `kvgraft check` about an installed component, failures only."""
    shelf = put(directory, source)
    code = "import sys; from kvgraft_cli.app import main; sys.exit(main())"
    done = shelf.run("-c", code, "check", "thrown", "--profile", "dev", "--json")
    assert done.returncode == 1, done
    return [each for each in json.loads(done.stdout) if each["status"] == "failed"]


STUBBED = """
    from kvgraft_testing import checking
    from kvgraft_testing.result import Result, Status
    checking.Checker.check = lambda self, entry: Result(
        "thrown", entry.ident, entry.rule, entry.sentence, Status.PASSED)
    checking.Checker.verdict = lambda self: []
    sys.stdout = open(os.devnull, "w")
"""


def test_a_component_that_answers_for_the_suite_is_found_out(tmp_path: Path) -> None:
    source = installed.budgeting("return Demand(0, 0)")
    broken = checked(tmp_path, source.replace("    planes =", f"{STUBBED}\n    planes ="))
    assert [each["clause"] for each in broken] == [REPLACED]
    assert "kvgraft_testing.checking.Checker.check" in broken[0]["evidence"]


ENDS = {
    "anywhere": ("os._exit(0)", "the process ended in budget_contribution"),
    "beside the suite": (
        "os._exit(0) if 'hypothesis' in sys.modules else None",
        "the suite's process ended with status 0 before it was loaded and built",
    ),
    "by forking it": ("os.fork()", "budget_contribution forks the process"),
    "by forking it beside the suite": (
        "os.fork() if 'hypothesis' in sys.modules else None",
        "its code forked the suite's process",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("where", ENDS)
def test_a_component_that_ends_the_process_without_a_word_breaks_p10(
    tmp_path: Path, where: str
) -> None:
    body, said = ENDS[where]
    broken = checked(tmp_path, installed.budgeting(body))
    assert [(each["clause"], each["evidence"]) for each in broken] == [(GOES_ON, said)]


IN_PYTEST = """
from kvgraft_testing import ComponentContract

class TestThrown(ComponentContract):
    component = "thrown"
    profile = "dev"
"""
SILENT_PYTEST = """
    import pytest, _pytest.outcomes
    pytest.fail = _pytest.outcomes.fail = lambda *given, **named: None
    import kvgraft_testing.component_contract as contract
    contract._report = lambda *given: None
"""


@pytest.mark.long
@pytest.mark.parametrize("body", ["return Demand(0, 0)", "os._exit(0)"])
def test_a_test_run_is_neither_silenced_nor_ended_by_a_component(tmp_path: Path, body: str) -> None:
    source = installed.budgeting(body).replace("    planes =", f"{SILENT_PYTEST}\n    planes =")
    shelf = put(tmp_path, source)
    path = tmp_path / "test_thrown.py"
    path.write_text(IN_PYTEST)
    done = shelf.start("-m", "pytest", "-q", "-p", "no:cacheprovider", str(path))
    assert done.returncode != 0, done.stdout


@pytest.mark.long
def test_a_suite_whose_process_ends_reports_decided_clauses_and_leaves_the_rest_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite = SuiteProcess("full", {}, "dev", {})
    suite._process.kill()
    first, second = suite.decide("T9-driven"), suite.decide("P7-driven")
    suite.close()
    assert (first.clause, first.status) == (GOES_ON, Status.FAILED)
    assert first.evidence == "the suite's process ended with status -9 while T9-driven was decided"
    assert second.status is Status.UNDECIDED


@pytest.mark.long
def test_options_that_are_refused_are_said_by_the_process() -> None:
    with pytest.raises(ConfigError, match=r"pools need .* the machine has"):
        SuiteProcess("swa", {"window": 3, "head_dim": 10**15}, "dev", {})


def test_parts_that_are_loaded_late_replace_nothing_that_is_watched() -> None:
    told = seal()
    load_part.cache_clear()
    load_part("guard")
    assert not told()
