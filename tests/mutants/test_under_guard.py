"""Bad cores are found by the guard alone in busy replays; without a defect it is silent."""

from __future__ import annotations

import re
import sys

import pytest

from ..commands import ROOT, run
from .guarded_cores import GUARDED_CORES
from .under_guard import TABLE, patched, source_of

AT_LEAST = 0.6
"""Share of the bad cores that the guard finds."""

SHARE = 8
"""One in so many bad cores that the table has as found is judged anew by the long test."""

FOUND_AT_ONCE = (
    "a match skips a node after each gap",
    "a split forgets when the upper part was used",
    "rows of a backup are crossed",
)
"""Found early in the replay without a store, which is the same however busy the machine is."""


def listed() -> list[tuple[str, str, str]]:
    """The rows of the table: the bad core, the rules it breaks, and the one named."""
    text = TABLE.read_text(encoding="utf-8")
    return re.findall(r"^\| (.+) \| ([A-Z0-9 ]+) \| (\S+) \|$", text, re.MULTILINE)


def judged(*names: str) -> dict[str, str]:
    """The rules that the guard names for some bad cores; `-` for none."""
    done = run(sys.executable, "-m", "tests.mutants.under_guard", *names, cwd=ROOT, timeout_s=7200)
    rows = re.findall(r"^ *[\d.]+ s +(\S+)  (.+?)(?: \*)?$", done.stdout, re.MULTILINE)
    return {name: rule for rule, name in rows}


def test_the_guard_names_the_rule_that_a_bad_core_breaks() -> None:
    found = judged(*FOUND_AT_ONCE)
    assert {name: found[name] in GUARDED_CORES[name].rules for name in FOUND_AT_ONCE} == (
        dict.fromkeys(FOUND_AT_ONCE, True)
    )


@pytest.mark.long
@pytest.mark.parametrize("name", ["sessions", "stored", "windows"])
def test_the_guard_is_silent_about_a_busy_replay(name: str) -> None:
    from .busy_replays import play

    assert play(name) == ""


@pytest.mark.long
@pytest.mark.timeout(0)
def test_the_guard_finds_most_of_a_share_of_the_bad_cores_in_one_busy_replay() -> None:
    meant = [name for name, _, rule in listed() if rule != "nothing"][::SHARE]
    found = judged("in=drawn", *meant)
    assert list(found) == meant
    killed = [name for name, rule in found.items() if rule != "-"]
    assert len(killed) >= AT_LEAST * len(found), sorted(set(found) - set(killed))


@pytest.mark.parametrize("name", GUARDED_CORES)
def test_a_bad_core_is_the_core_with_a_text_replaced(name: str) -> None:
    core = GUARDED_CORES[name]
    source = source_of(core).read_text(encoding="utf-8")
    compile(patched(source, core), core.module, "exec")


def test_the_table_has_every_bad_core_and_most_are_found() -> None:
    text, rows = TABLE.read_text(encoding="utf-8"), listed()
    meant = [(name, " ".join(core.rules)) for name, core in GUARDED_CORES.items()]
    assert [row[:2] for row in rows] == meant, "run `make mutants`"
    killed = sum(rule != "nothing" for _, _, rule in rows)
    assert f"{killed} of {len(rows)} are found by the guard alone.\n" in text
    assert killed >= AT_LEAST * len(rows)
