"""The files to read first are few and short."""

from __future__ import annotations

import re

from ..commands import ROOT

MOST_LINES = 2_500


def test_eight_files_to_read_first_are_short_together_and_have_the_names_to_look_for() -> None:
    text = (ROOT / "docs" / "read-this-first.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[^]]+\]\(\.\./(\S+\.py)\) \|.*\| (.*) \|$", text, re.MULTILINE)
    sources = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in rows}
    assert len(sources) == 8
    assert sum(len(source.splitlines()) for source in sources.values()) <= MOST_LINES
    for path, names in rows:
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"\b(def|class) {name}\b", sources[path]), (path, name)


def test_the_methods_that_the_page_names_are_there() -> None:
    text = (ROOT / "docs" / "read-this-first.md").read_text(encoding="utf-8")
    core = [path.read_text(encoding="utf-8") for path in (ROOT / "core" / "src").rglob("*.py")]
    named = re.findall(r"`([A-Z]\w+)\.(\w+)`", text)
    assert len(named) > 5
    for kind, method in named:
        assert any(
            re.search(rf"^class {kind}\b", source, re.MULTILINE) and f"def {method}(" in source
            for source in core
        ), f"{kind}.{method}"
