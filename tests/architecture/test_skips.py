"""The marker `gpu` alone skips tests for want of an accelerator, so that one command runs all."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..commands import ROOT

ACCELERATORS = re.compile(r"cuda|gpu|xpu|rocm|accelerator|is_available|device_c", re.IGNORECASE)

DECIDING = {"conftest.py", "tests/gpu.py", "tests/acceptance/__main__.py"}
"""Files that ask torch for an accelerator."""

STANDING_IN = "tests/devices/toy/__init__.py"
"""A device that answers."""

ASKING = {"is_available", "device_count", "get_device_capability"}


def python_files() -> list[Path]:
    """All tests, and what they share."""
    folders = [ROOT / "tests", *ROOT.glob("plugins/*/tests"), *ROOT.glob("examples/**/tests")]
    return [ROOT / "conftest.py", *(path for each in folders for path in each.rglob("*.py"))]


def skips(text: str) -> Iterator[str]:
    """Skips that mention an accelerator, in the condition around them, too."""
    tree = ast.parse(text)
    around = {
        id(inner): outer.test
        for outer in ast.walk(tree)
        if isinstance(outer, ast.If)
        for each in outer.body
        for inner in ast.walk(each)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {
            "skip",
            "skipif",
            "importorskip",
            "SkipTest",
        }:
            said = ast.unparse(node)
            condition = around.get(id(node))
            if ACCELERATORS.search(said + (ast.unparse(condition) if condition else "")):
                yield said


def questions(text: str) -> Iterator[str]:
    """Calls that ask torch for an accelerator."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and node.attr in ASKING:
            yield ast.unparse(node)


BAD = (
    "@pytest.mark.skipif(not torch.cuda.is_available(), reason='none here')\ndef test(): ...",
    "def test():\n    pytest.skip('needs a GPU')",
    "def test():\n    if not torch.xpu.device_count():\n        pytest.skip('not here')",
    "ON_GPU = pytest.mark.skipif(NOT_HERE, reason='no CUDA device')",
    "pytest.importorskip('cuda.bindings')",
)


@pytest.mark.parametrize("text", BAD)
def test_a_skip_that_decides_for_itself_is_seen(text: str) -> None:
    assert list(skips(text))


def test_only_the_marker_skips_for_want_of_an_accelerator() -> None:
    found: dict[str, list[str]] = {}
    for path in python_files():
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        if not ACCELERATORS.search(text):
            found[name] = []  # not worth a syntax tree
        elif name not in DECIDING and name != Path(__file__).relative_to(ROOT).as_posix():
            found[name] = [*skips(text), *(questions(text) if name != STANDING_IN else ())]
    assert {name: each for name, each in found.items() if each} == {}
    assert len(found) > 300
