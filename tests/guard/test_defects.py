"""Every guarded rule, broken on purpose, is named by the guard; without the defect it is silent."""

from __future__ import annotations

import re

import pytest

from kvgraft import ContractViolation
from kvgraft_guard import GUARDED
from kvgraft_testing.rules import RULES

from ..commands import ROOT
from . import (
    books_defects,
    event_defects,
    hook_defects,
    keeping_defects,
    memory_defects,
    request_defects,
    shadow_defects,
    step_defects,
    storage_defects,
    tenant_defects,
    waiting_defects,
)
from .defect import DEFECTS
from .scene import Patched, Unpatched

REGISTERED = (
    books_defects,
    event_defects,
    hook_defects,
    keeping_defects,
    memory_defects,
    request_defects,
    shadow_defects,
    step_defects,
    storage_defects,
    tenant_defects,
    waiting_defects,
)

RAISED = (
    r'(?:ContractViolation|IntegrityError|_check_copy)\(\s*"([A-Z]\d+)"(?: if [^"]*"[A-Z]\d+")?'
)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", DEFECTS)
def test_the_guard_names_the_rule_that(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, component, play = DEFECTS[name]
    with pytest.raises(ContractViolation) as caught:
        play(Patched(monkeypatch))
    assert (caught.value.rule, caught.value.component) == (rule, component), caught.value
    assert re.search(r"\d", caught.value.evidence), "evidence is numbers"


@pytest.mark.one_in(16)
@pytest.mark.parametrize("name", DEFECTS)
def test_without_the_defect_the_guard_is_silent_about(name: str) -> None:
    DEFECTS[name].play(Unpatched())


def test_every_guarded_rule_is_broken_by_a_defect() -> None:
    assert {defect.rule for defect in DEFECTS.values()} == GUARDED.keys()


def test_guarded_rules_are_rules_of_the_contract_and_each_is_raised() -> None:
    assert GUARDED.keys() <= RULES.keys()
    raised = set()
    for path in [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/guard/src/**/*.py")]:
        text = path.read_text(encoding="utf-8")
        raised |= set(re.findall(RAISED, text))
    assert GUARDED.keys() <= raised


def test_every_rule_that_the_guard_raises_is_listed() -> None:
    """But for those that `check_integrity` alone recomputes."""
    raised = set()
    for path in (ROOT / "plugins" / "guard" / "src" / "kvgraft_guard").glob("*.py"):
        if path.name == "integrity.py":
            continue
        text = path.read_text(encoding="utf-8")
        raised |= set(re.findall(RAISED, text))
    assert raised <= GUARDED.keys()
