"""`docs/contract.md` and the README's table agree with the code, and every rule is enforced."""

from __future__ import annotations

import ast
import importlib.util
import re
from types import ModuleType

import pytest

from kvgraft_testing.rules import RULES

from ..commands import ROOT


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_contract_is_up_to_date(generator: ModuleType) -> None:
    written = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    assert written == generator.contract(), "run `make docs`"


def test_the_table_of_places_is_up_to_date(generator: ModuleType) -> None:
    written = (ROOT / "docs" / "where-rules-are-enforced.md").read_text(encoding="utf-8")
    assert written == generator.places(), "run `make docs`"


def test_each_place_of_a_rule_names_it(generator: ModuleType) -> None:
    """Read from the table itself; a rule without any place is not there yet."""
    text = (ROOT / "docs" / "where-rules-are-enforced.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]\d+) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert [rule for rule, _, _ in rows] == list(RULES)
    for rule, *cells in rows:
        named = {place.partition("::")[0] for place in generator.tests().get(rule, ())}
        columns = (("core/src/kvgraft", f'"{rule}"'), ("tests", rf"\b{rule}\b"))
        for cell, (below, said) in zip(cells, columns):
            for place in re.findall(r"`(.*?)`", cell):
                outside = place.startswith(("plugins/", "benchmarks/"))
                path = place if outside else f"{below}/{place}"
                there = (ROOT / path).read_text(encoding="utf-8")
                assert path in named or re.search(said, there), f"{rule}: {place}"
    assert [rule for rule, *cells in rows if cells == ["–", "–"]] == []


def test_the_readmes_conformance_table_is_up_to_date(generator: ModuleType) -> None:
    assert (ROOT / "README.md").read_text(encoding="utf-8") == generator.readme(), "run `make docs`"


def test_every_rule_is_enforced(generator: ModuleType) -> None:
    found = generator.enforcers()
    assert [rule for rule, places in found.items() if not places] == []


def test_every_test_named_for_a_rule_exists(generator: ModuleType) -> None:
    for rule, places in generator.tests().items():
        assert rule in RULES
        for place in places:
            name, _, test = place.partition("::")
            path = ROOT / name
            assert path.is_file(), f"{rule}: {name} is not there"
            if test:
                tree = ast.parse(path.read_text(encoding="utf-8"))
                functions = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
                assert test in functions, f"{rule}: {name} has no {test}"


def test_no_rule_is_cited_that_does_not_exist() -> None:
    paths = [*(ROOT / "core" / "src").rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    citations = re.findall(r"\((?:[A-Z]\d{1,2}(?:, | to )?)+\)", text)
    cited = {rule for citation in citations for rule in re.findall(r"[A-Z]\d{1,2}", citation)}
    assert cited
    assert cited <= RULES.keys()


def test_the_contracts_families_and_numbers_have_no_gap() -> None:
    numbers: dict[str, list[int]] = {}
    for rule in RULES:
        numbers.setdefault(rule[0], []).append(int(rule[1:]))
    assert {letter: len(found) for letter, found in numbers.items()} == {
        "T": 12,
        "M": 9,
        "I": 12,
        "L": 8,
        "E": 7,
        "V": 3,
        "B": 7,
        "R": 8,
        "S": 11,
        "A": 13,
        "D": 5,
        "H": 8,
        "P": 10,
        "K": 7,
        "N": 5,
        "G": 6,
    }
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())
