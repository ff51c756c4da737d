"""Results of `drive`: counts, a broken rule, and the calls that show it."""

from __future__ import annotations

import importlib
import re
import sys
from functools import cache
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import rule as drawn_rule

from kvgraft import (
    ComponentMatch,
    ConfigError,
    ContractViolation,
    Everything,
    PluginError,
    Reach,
    Trailing,
)
from kvgraft.config import WritePolicy
from kvgraft.packages.registry import Plugin
from kvgraft_testing.machine import (
    MACHINE_RULES,
    CacheMachine,
    Drive,
    drive,
    machine_for,
    paged_plugin,
    references,
    setup_for,
    state_plugin,
)
from kvgraft_testing.machine.brute_force import ModelComponent, ModelTerm
from kvgraft_testing.machine.deriving import model_components
from kvgraft_testing.machine.driving import DECLARED
from kvgraft_testing.machine.engines import PromptedTransferEngine
from kvgraft_testing.machine.examples import Rule, unless_over
from kvgraft_testing.machine.setups import open_cache
from kvgraft_testing.machine.shrinking import shrunk
from kvgraft_testing.machine.sizes import Sizes
from kvgraft_testing.machine.unrolling import unrolled

from ..commands import ROOT
from . import oddities
from .setups import OPTIONS, WINDOW

SHORT = settings(derandomize=True, max_examples=10, stateful_step_count=40)
MACHINE = ROOT / "plugins" / "testing" / "src" / "kvgraft_testing" / "machine"


def too_long(component: object, view: object) -> ComponentMatch:
    return ComponentMatch(view.anchor + (view.anchor > 0))  # type: ignore[attr-defined]


def wrong_hook(**hooks: object) -> Plugin:
    return oddities.package("mine", oddities.of_pages, **hooks)


def test_the_model_of_a_component_equals_its_declaration() -> None:
    setup = setup_for(list(OPTIONS), OPTIONS)
    cache = open_cache(setup, Sizes(), PromptedTransferEngine())
    found = {each.name: each for each in model_components(cache.mounted)}
    cache.close()
    assert found == {
        "full": ModelComponent("full", (ModelTerm("all"),), can_copy=False),
        "swa": ModelComponent("swa", (ModelTerm("last", WINDOW),), can_copy=False),
        "mamba": ModelComponent("mamba", (ModelTerm("state"),)),
        "hisparse": ModelComponent(
            "hisparse", (ModelTerm("all"),), home_is_host=True, can_copy=False
        ),
    }


@pytest.mark.parametrize("plugin", references(), ids=lambda plugin: plugin.name)
def test_a_reference_component_keeps_every_rule(plugin: Plugin) -> None:
    found = drive(setup_for([plugin]), settings=SHORT)
    assert found.violation is None, found.steps
    assert found.counts["admitted"]
    assert found.counts["examples"] >= 10


@pytest.mark.long
@pytest.mark.parametrize("plugin", references(), ids=lambda plugin: plugin.name)
def test_a_reference_component_keeps_every_rule_in_a_longer_run(plugin: Plugin) -> None:
    found = drive(setup_for([plugin]), settings=settings(SHORT, max_examples=100))
    assert found.violation is None, found.steps
    assert found.counts["examples"] >= 100


UNUSUAL = [
    oddities.of_planes(((3,), torch.int8), ((5, 2), torch.float16), ((1,), torch.float64)),
    oddities.of_planes(((1,), torch.uint8)),
    oddities.of_planes(((7, 11), torch.float32)),
    oddities.joined_on_host(),
    oddities.coarse(),
    oddities.tiny(),
    paged_plugin("wide", Reach(Trailing(5000))),
    paged_plugin("thrice", Reach(Everything()), 3, mirrored=False),
    state_plugin("lone", mirrored=False, can_copy=False),
]


def expect_no_alarm(plugin: Plugin, n_examples: int) -> None:
    chosen = settings(SHORT, max_examples=n_examples)
    found = drive(setup_for([plugin], beside=references()), settings=chosen)
    assert found.violation is None, found.steps
    assert found.counts["admitted"]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("plugin", UNUSUAL[::2], ids=lambda plugin: plugin.name)
def test_no_alarm_is_raised_about_unusual_legal_operations(plugin: Plugin) -> None:
    expect_no_alarm(plugin, 4)


@pytest.mark.long
@pytest.mark.parametrize("plugin", UNUSUAL, ids=lambda plugin: plugin.name)
def test_no_alarm_is_raised_in_a_longer_run(plugin: Plugin) -> None:
    expect_no_alarm(plugin, 100)


@cache
def failure() -> Drive:
    """A search that finds a broken rule, in few calls, so that making them fewer is quick."""
    few = settings(SHORT, stateful_step_count=12)
    return drive(setup_for([wrong_hook(finalize_match_result=too_long)]), settings=few)


def test_a_broken_rule_comes_with_the_calls_that_show_it_and_nothing_is_printed_or_stored(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    failure.cache_clear()
    found = failure()
    assert found.violation is not None
    assert (found.violation.rule, found.violation.component) == ("M5", "mine")
    assert len(found.steps) < 20
    assert found.steps[0].startswith("open pages of")
    assert "mine.finalize_match_result(MatchView(" in found.steps[-1]
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_the_rules_of_a_failure_break_it_again() -> None:
    setup = setup_for([wrong_hook(finalize_match_result=too_long)])
    found = failure()
    state: CacheMachine = machine_for(setup)()
    for rule in found.rules[:-1]:
        getattr(state, rule.name)(**rule.drawn)
    last = found.rules[-1]
    with pytest.raises(ContractViolation, match="lengthened the match"):
        getattr(state, last.name)(**last.drawn)


def test_a_scene_is_reported_as_the_calls_it_made() -> None:
    drawn = {"page_size": 1, "device": 12, "host": 14, "load": None, "cut_tokens": 0}
    rules = [
        Rule("open", {**drawn, "policy": WritePolicy.WRITE_THROUGH}, 0),
        Rule("arrive_twice", {"stem": (1,), "length": 1, "own": 1}, 1),
    ]
    names = [rule.name for rule in unrolled(machine_for(setup_for(references()[:1]))(), rules, 1)]
    assert names[:5] == ["open", "begin", "begin", "admit", "load_back"]
    assert names[-5:] == ["begin", "admit", "load_back", "finish", "step_all"]


class Dividing(CacheMachine):
    """A machine with a rule that breaks one of the contract, and does not work with zero."""

    @drawn_rule(n_parts=st.integers(2, 3))
    @unless_over
    def divide(self, n_parts: int) -> None:
        self.judge.fail("M1", None, f"{12 // n_parts} pages")


def test_values_that_a_rule_cannot_work_with_are_passed_over_as_a_failure_is_made_smaller() -> None:
    given = machine_for(setup_for(references()[:1]))
    machine = type("Dividing", (Dividing,), {**vars(given)})
    state = machine()
    sizes = {"page_size": 1, "device": 12, "host": 14, "load": None, "cut_tokens": 0}
    state.open(**sizes, policy=WritePolicy.WRITE_THROUGH)
    with pytest.raises(ContractViolation):
        state.divide(n_parts=3)
    assert shrunk(machine, state.failures[0]).rules[-1].drawn == {"n_parts": 1}


def test_an_ignored_rule_is_counted_and_the_others_are_still_looked_at() -> None:
    calls = 0

    def release(component: object, segment: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 300:
            raise RuntimeError("locked out")

    setup = setup_for(
        [
            wrong_hook(
                finalize_match_result=too_long,
                acquire_component_lock=lambda component, query: None,
                release_component_lock=release,
            )
        ]
    )
    found = drive(setup, settings=SHORT, ignored=frozenset({"M5"}))
    assert found.violation is None, found.steps
    assert found.counts["ignored M5"]
    assert found.counts["finish"]


def test_a_hook_that_raises_where_the_core_goes_on_is_found() -> None:
    """A backup that cannot be built is given up, and only logged."""

    def build(component: object, query: object) -> None:
        raise RuntimeError("no bus")

    setup = setup_for(
        [
            wrong_hook(
                build_hicache_transfers=build,
                commit_hicache_transfers=lambda component, query: None,
                abort_hicache_transfers=lambda component, query: None,
            )
        ]
    )
    found = drive(setup, settings=SHORT)
    assert found.violation is not None
    assert (found.violation.rule, found.violation.component) == ("R2", "mine")
    assert "no bus" in found.violation.evidence


def test_a_rule_that_is_broken_once_and_never_again_is_found_all_the_same() -> None:
    calls = 0

    def answer(component: object, view: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 200:
            raise RuntimeError("once")

    found = drive(setup_for([wrong_hook(finalize_match_result=answer)]), settings=SHORT)
    assert found.violation is not None
    assert (found.violation.rule, found.violation.component) == ("M5", "mine")
    assert found.steps
    assert calls > 200


def test_pools_too_small_for_any_request_break_no_rule_and_show_in_the_counts() -> None:
    setup = setup_for([oddities.tiny()], {"tiny": {"slots": 1}})
    found = drive(setup, settings=SHORT)
    assert found.violation is None, found.steps
    assert found.counts["begin"]
    assert not found.counts["admitted"]


def test_options_that_are_refused_are_the_callers_to_correct() -> None:
    with pytest.raises(PluginError, match="slots=0"):
        drive(setup_for([oddities.tiny()], {"tiny": {"slots": 0}}))
    with pytest.raises(ConfigError, match="'nothing' is not installed"):
        setup_for(["nothing"])


def test_runs_add_up_and_the_first_broken_rule_counts() -> None:
    good = drive(setup_for([references()[1]]), settings=settings(SHORT, max_examples=8))
    bad = failure()
    both = good.then(bad).then(Drive(good.counts))
    assert both.violation is bad.violation
    assert both.steps == bad.steps
    assert both.counts["begin"] == 2 * good.counts["begin"] + bad.counts["begin"]


@pytest.mark.long
def test_equal_searches_do_the_same_after_any_imports_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = settings(SHORT, max_examples=30, stateful_step_count=3)
    before = drive(setup_for(references()[:1]), settings=many).counts
    (tmp_path / "numbers_of_a_user.py").write_text(f"NUMBERS = {list(range(100, 255))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("numbers_of_a_user")
    monkeypatch.setitem(sys.modules, "numbers_of_a_user", module)
    assert drive(setup_for(references()[:1]), settings=many).counts == before


def test_every_rule_the_machine_names_is_in_its_list() -> None:
    named = {
        rule
        for path in MACHINE.glob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
        for rule in quoted_rules(line)
    }
    assert named - DECLARED <= MACHINE_RULES


def quoted_rules(line: str) -> list[str]:
    return re.findall(r'"([TMILEBRSADHPKVG]\d{1,2})"', line)
