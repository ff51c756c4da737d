"""The fragments of changes/ are well formed, and `make changelog` loses nothing of them."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from ..commands import ROOT, run

KINDS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
FRAGMENTS = sorted(path for path in ROOT.glob("changes/*.md") if path.name != "README.md")
MARK = "<!-- scriv-insert-here -->"
GOOD = "### Changed\n\n- A call\n  does something.\n- Another.\n\n### Fixed\n\n- A defect.\n"


def problems(text: str) -> list[str]:
    """Lines of a fragment that do not belong in one, and why."""
    found = []
    kinds: list[str] = []
    bullet = False
    for line in text.splitlines():
        if line.startswith("#"):
            kinds.append(line.removeprefix("### "))
            bullet = False
            if kinds[-1] not in KINDS or kinds.count(kinds[-1]) > 1:
                found.append(f"{line!r} is no kind of change of its own")
        elif line.startswith("- ") and kinds:
            bullet = True
        elif line and not (bullet and line.startswith("  ")):
            found.append(f"{line!r} is not in a bullet below a kind of change")
        if len(line) > 120:
            found.append(f"{line!r} has more than 120 characters")
        if re.search(r"\]\((?!\w+://)", line):
            found.append(f"{line!r} links to a file; name it in backticks")
    return found if bullet or found else ["it ends without a bullet"]


def test_fragments_are_well_formed() -> None:
    wrong = [
        f"{path.name}: {problem}"
        for path in FRAGMENTS
        for problem in problems(path.read_text(encoding="utf-8"))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it ends without a bullet"),
        ("### Added\n", "it ends without a bullet"),
        ("- A call.\n", "is not in a bullet below"),
        ("### Added\n\nA call.\n", "is not in a bullet below"),
        ("## Added\n\n- A call.\n", "is no kind of change"),
        ("### Improved\n\n- A call.\n", "is no kind of change"),
        ("### Added\n\n- A.\n\n### Added\n\n- B.\n", "is no kind of change of its own"),
        ("### Added\n\n- [a](../docs/guard.md).\n", "links to a file"),
        (f"### Added\n\n- {'a' * 120}\n", "more than 120"),
    ],
)
def test_a_fragment_that_is_not_is_found(text: str, problem: str) -> None:
    assert problem in "; ".join(problems(text))


def test_a_good_fragment_is_good() -> None:
    assert problems(GOOD) == []


@pytest.mark.skipif(shutil.which("git") is None, reason="scriv needs git")
def test_the_changelog_gets_every_fragment_under_its_kind(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "changes", tmp_path / "changes")
    (tmp_path / "changes" / "good.md").write_text(GOOD)
    collect = ("-m", "scriv", "collect", "--version", "98.7.6")
    done = run(sys.executable, *collect, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "changes").iterdir()] == ["README.md"]

    text = (tmp_path / "CHANGELOG.md").read_text(encoding="utf-8")
    head, released = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split(MARK)
    start, _, rest = text.partition(MARK)
    assert start == head
    assert rest.endswith(released)
    section = rest.removesuffix(released)
    assert re.match(r"\s*## 98\.7\.6, 20\d\d-\d\d-\d\d\n", section)
    parts = re.split(r"^### (\w+)$", section, flags=re.MULTILINE)[1:]
    by_kind = dict(zip(parts[::2], parts[1::2], strict=True))
    assert [kind for kind in KINDS if kind in by_kind] == [*by_kind]
    for fragment in [GOOD, *(path.read_text(encoding="utf-8") for path in FRAGMENTS)]:
        kinds = re.split(r"^### (\w+)$", fragment, flags=re.MULTILINE)[1:]
        for kind, bullets in zip(kinds[::2], kinds[1::2], strict=True):
            assert bullets.strip() in by_kind[kind]
