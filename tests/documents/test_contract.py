"""`docs/contract.md` claims no enforcement that is not there."""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

import pytest

from ..commands import ROOT

GROUPS = {"T": 12, "M": 9, "I": 8, "L": 8, "E": 7, "B": 7, "R": 8, "A": 13, "H": 8, "P": 8}
"""Rules by letter and number; storage (S) and ranks (D) are listed as ranges."""


class Row(NamedTuple):
    rule: str
    places: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for line in (ROOT / "docs" / "contract.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and re.match(r"[A-Z]\d", cells[0]):
            found.append(Row(cells[0], tuple(part.strip() for part in cells[2].split(","))))
    return found


ROWS = rows()


def sources(*directories: str) -> str:
    return "\n".join(
        path.read_text(encoding="utf-8")
        for directory in directories
        for path in sorted((ROOT / directory).rglob("*.py"))
    )


def test_every_rule_has_one_row() -> None:
    expected = {f"{letter}{number}" for letter, n in GROUPS.items() for number in range(1, n + 1)}
    listed = [row.rule for row in ROWS]
    assert len(listed) == len(set(listed))
    assert set(listed) == expected | {"S1 to S11", "D1", "D2 to D3"}
    assert all(row.places and all(row.places) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.rule)
def test_a_rule_is_enforced_where_its_row_says(row: Row) -> None:
    for place in row.places:
        if place == "integrity":
            raised = rf'IntegrityError\(\s*"{row.rule}"'
            assert re.search(raised, sources("core/src")), f"no IntegrityError of {row.rule}"
        elif place == "runtime":
            raised = rf'ContractViolation\(\s*"{row.rule}"'
            assert re.search(raised, sources("core/src")), f"no ContractViolation of {row.rule}"
        elif place == "model":
            assert re.search(rf"\b{row.rule}\b", sources("tests/model")), f"no {row.rule} in model"
        elif place == "load":
            assert re.search(rf"\b{row.rule}\b", sources("core/src/kvgraft"))
        elif place == "not yet":
            assert row.rule[0] in "SD"
        else:
            assert place == place.strip("`") or place.count("`") == 2, place
            _exists(place.strip("`"))


def _exists(place: str) -> None:
    name, _, test = place.partition("::")
    path = ROOT / name
    assert path.is_file(), f"{name} is not there"
    if test:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert test in names, f"{name} has no {test}"


def test_no_rule_is_cited_that_is_not_listed() -> None:
    listed = {row.rule for row in ROWS} | {f"S{n}" for n in range(1, 12)} | {"D2", "D3"}
    text = sources("core/src", *(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins/*/src")))
    cited = set(re.findall(r"\((?:[A-Z]\d{1,2}(?:, | to )?)+\)", text))
    rules = {rule for citation in cited for rule in re.findall(r"[A-Z]\d{1,2}", citation)}
    assert rules <= listed
