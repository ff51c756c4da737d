"""Links of all documents lead to files and headings, and code blocks of all documents parse."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import sys
from typing import NamedTuple

from ..commands import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        *("*.md", "docs/**/*.md", "changes/*.md", "core/*.md", "plugins/*/*.md", ".github/**/*.md"),
        *("benchmarks/*.md", "examples/**/*.md"),
    )
    for path in ROOT.glob(pattern)
)

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


class Block(NamedTuple):
    """A fenced block of a document."""

    document: str
    line: int
    language: str
    text: str


def prose(document: str) -> str:
    """A document without its fenced blocks."""
    return FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))


def blocks(*languages: str) -> list[Block]:
    found = []
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for match in FENCE.finditer(text):
            if match[2] in languages:
                line = text.count("\n", 0, match.start()) + 1
                found.append(Block(document, line, match[2], match[3]))
    return found


def anchors(document: str) -> set[str]:
    """The names of a document's headings, as forges and the site make them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        assert name not in found, f"{document}: two headings are called {name}; rename one"
        found.add(name)
    return found


def named(block: Block) -> str:
    return f"{block.document}:{block.line}"


def test_documents_of_all_kinds_are_looked_at() -> None:
    assert {"README.md", "docs/storage.md", "plugins/full/README.md"} <= set(DOCUMENTS)
    assert len(DOCUMENTS) > 50
    assert len(blocks("python")) > 20


def test_links_lead_to_files_and_headings() -> None:
    dead = []
    for document in DOCUMENTS:
        for target, anchor in LINK.findall(prose(document)):
            if "://" in target or target.startswith("mailto:"):
                continue
            path = (ROOT / document).parent / target if target else ROOT / document
            if not path.exists():
                dead.append(f"{document}: {target} is not there")
            elif anchor and anchor not in anchors(str(path.resolve().relative_to(ROOT))):
                dead.append(f"{document}: {target} has no heading {anchor}")
    assert not dead


def test_python_blocks_parse_and_import_existing_names() -> None:
    missing = []
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block.text, named(block))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "kvgraft"
            ):
                continue
            assert node.module is not None
            if importlib.util.find_spec(node.module.partition(".")[0]) is None:
                continue  # the package that the document is about to write
            module = importlib.import_module(node.module)
            names = [each.name for each in node.names if not hasattr(module, each.name)]
            missing += [f"{named(block)}: {node.module} has no {name}" for name in names]
    assert not missing


def test_toml_and_json_blocks_parse() -> None:
    for block in blocks("toml"):
        assert tomllib.loads(block.text), named(block)
    for block in blocks("json"):
        assert json.loads(block.text), named(block)
