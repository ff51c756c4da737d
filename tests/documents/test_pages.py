"""Every page is linked from the README; the glossary is in order."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from ..commands import ROOT

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PAGES = sorted((ROOT / "docs").glob("*.md"))


def targets(document: Path) -> set[Path]:
    text = document.read_text(encoding="utf-8")
    return {(document.parent / link).resolve() for link in LINK.findall(text)}


def test_the_readme_links_every_page() -> None:
    missing = {page.resolve() for page in PAGES} - targets(ROOT / "README.md")
    assert not [page.name for page in missing]


def test_the_glossarys_words_are_one_table_in_order() -> None:
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    at = lines.index("| word | meaning |")
    assert not [line for line in lines[:at] if line.startswith("| ")]
    rows = itertools.takewhile(lambda line: line.startswith("| "), lines[at + 2 :])
    words = [row.split("|")[1].strip() for row in rows]
    assert words == sorted(words, key=str.casefold)
    kinds = {"branch", "cut", "grid", "repeat"}
    assert kinds <= set(words)
