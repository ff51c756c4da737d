"""Every page is linked from the README; the glossary is in order; lines are wrapped."""

from __future__ import annotations

import re
from pathlib import Path

from ..commands import ROOT

LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
PAGES = sorted((ROOT / "docs").glob("*.md"))


CODE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)


def targets(document: Path) -> set[Path]:
    text = document.read_text(encoding="utf-8")
    return {(document.parent / link).resolve() for link in LINK.findall(text)}


def test_the_readme_links_every_page() -> None:
    missing = {page.resolve() for page in PAGES} - targets(ROOT / "README.md")
    assert not [page.name for page in missing]


def test_one_table_of_the_readme_lists_every_distribution() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\| package \| gives \|\n((?:\|.*\n)+)", text)
    listed = dict(
        re.findall(r"^\| \[`(kvgraft[\w-]*)`\]\((\S+)/README\.md\) \| \w", table, re.MULTILINE)
    )
    folders = [
        ROOT / "core",
        *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
    ]
    named = re.compile(r'^name = "(.+)"$', re.MULTILINE)
    there = {}
    for folder in folders:
        (name,) = named.findall((folder / "pyproject.toml").read_text(encoding="utf-8"))
        there[name] = str(folder.relative_to(ROOT))
    assert listed == there


def test_the_glossarys_words_are_one_table_in_order() -> None:
    lines = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").splitlines()
    at = lines.index("| word | meaning |")
    end = lines.index("", at) if "" in lines[at:] else len(lines)
    rows = [lines[at], *lines[at + 2 : end]]
    assert all(row.startswith("| ") for row in rows)
    assert not any(line.startswith("| ") for line in lines[:at])
    words = [row.split("|")[1].strip() for row in rows[1:]]
    assert words == sorted(words, key=str.casefold)
    kinds = {"branch", "cut", "grid", "repeat"}
    assert kinds <= set(words)


def test_lines_of_prose_have_at_most_120_characters() -> None:
    pages = [
        page
        for pattern in (
            "*.md",
            "docs/**/*.md",
            "*/README.md",
            "plugins/*/README.md",
            "changes/*.md",
        )
        for page in sorted(ROOT.glob(pattern))
    ]
    assert ROOT / "README.md" in pages
    found = [
        f"{page.relative_to(ROOT)}: {line}"
        for page in pages
        for line in INDENTED.sub("", CODE.sub("", page.read_text(encoding="utf-8"))).splitlines()
        if len(line) > 120 and not line.startswith("|")
    ]
    assert found == []
