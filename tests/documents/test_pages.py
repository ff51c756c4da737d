"""Every page is linked from the README, and every link leads somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..commands import ROOT

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", *PAGES, *sorted((ROOT / "plugins").glob("*/README.md"))]


def targets(document: Path) -> set[Path]:
    text = document.read_text(encoding="utf-8")
    return {(document.parent / link).resolve() for link in LINK.findall(text)}


def test_the_readme_links_every_page() -> None:
    missing = {page.resolve() for page in PAGES} - targets(ROOT / "README.md")
    assert not [page.name for page in missing]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    assert not [target for target in targets(document) if not target.exists()]


def test_the_glossary_is_one_table_in_order() -> None:
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    at = lines.index("| word | meaning |")
    rows = [line for line in lines if line.startswith("| ")]
    assert rows == [lines[at], *lines[at + 2 :]]
    words = [row.split("|")[1].strip() for row in rows[1:]]
    assert words == sorted(words, key=str.casefold)
    kinds = {"branch", "cut", "grid", "repeat"}
    assert kinds <= set(words)
