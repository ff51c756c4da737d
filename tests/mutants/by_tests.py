"""`python -m tests.mutants.by_tests`: bad cores that the state machine lets live, under the tests.

Each gets a run of the tests in a process of its own, which ends at the first test that fails; the
quickest come first. At last those that failed are run without a defect, and must pass. Names as
arguments choose bad cores, also those that the machine finds; without any the table in
`docs/mutants.md` is written anew.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

from ..commands import ROOT
from .cores_held_out import CORES_HELD_OUT
from .put_in import BAD_CORE
from .survivors import SURVIVORS

__all__ = ["HEADING", "TABLE", "Verdict", "judge", "main", "written"]

TESTS = (
    "tests/tree",
    "tests/transfers",
    "tests/admission",
    "tests/model/test_mutation_sanity.py",
    "tests/serving/test_engine_side.py",
    "tests/requests/test_misuse.py",
    "tests/requests/test_cuts.py",
    "tests/resuming",
    "tests/regressions",
    "tests/guard",
    "tests/storage_tier/test_arriving.py",
    "tests/storage_tier/test_prefetch.py",
    "tests/storage_tier/test_storing.py",
    "tests/storage_tier/test_full_host.py",
)
"""Tests to run, in this order: first those that show a defect soonest, and quick ones."""

LONGEST_S = 900.0
TABLE = ROOT / "docs" / "mutants.md"
HEADING = "\n## Left to the tests\n"
HEAD = """
Cores of the list above that `kvgraft check` does not find, or finds under another rule, and the
first of the tests that fails on each. Written by `make mutants`; one alone:
`python -m tests.mutants.by_tests "recency does not climb"`.

| defect | breaks | the test that fails |
|---|---|---|
"""


class Verdict(NamedTuple):
    """The outcome of a bad core.

    Attributes:
        test: the first test that failed; empty if none did.
        evidence: the run's last line.
        seconds: how long it took.
    """

    test: str
    evidence: str
    seconds: float


def judge(name: str | None, tests: Sequence[str] = TESTS) -> Verdict:
    """Run the tests on a bad core until one fails; None for the core without a defect.

    Raises:
        RuntimeError: the tests did not run, or had not ended after `LONGEST_S`.
    """
    start = perf_counter()
    options = ["-x", "-q", "-n", "0", "-m", "not long", "-p", "no:cacheprovider", "--tb=line"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "tests.mutants.put_in", *options, *tests],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "500", BAD_CORE: name or ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise RuntimeError(f"{name}: no end after {LONGEST_S:.0f} s") from None
    last = said.strip().splitlines()[-1] if said.strip() else ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?::.+?)(?: - (.*))?$", said, re.MULTILINE)
    if process.returncode not in (0, 1) or (process.returncode == 1) != (failed is not None):
        raise RuntimeError(f"{name}: pytest ended with {process.returncode}: {said[-2000:]}")
    if failed is None:
        return Verdict("", last, perf_counter() - start)
    return Verdict(failed[1], failed[2] or last, perf_counter() - start)


def written(found: dict[str, Verdict]) -> str:
    """The section of the document; parameters and times are left out."""
    lines = [HEADING, HEAD]
    for name, verdict in found.items():
        test = verdict.test.partition("[")[0] or "none"
        lines.append(f"| {name} | {CORES_HELD_OUT[name].rules[0]} | {test} |\n")
    by_tests = sum(bool(verdict.test) for verdict in found.values())
    by_check, all_of_them = len(CORES_HELD_OUT) - len(found), len(CORES_HELD_OUT)
    lines.append(
        f"\nOf {all_of_them} cores check finds {by_check}, the tests {by_tests} more: "
        f"{100 * (by_check + by_tests) / all_of_them:.0f} % by both.\n"
    )
    return "".join(lines)


def main(names: Sequence[str]) -> None:
    """Judge the bad cores named, or all that survive the machine, and write the table."""
    unknown = sorted(set(names) - set(CORES_HELD_OUT))
    if unknown:
        sys.exit(f"no bad core is named {unknown[0]!r}; see tests/mutants/cores_held_out.py")
    found = {}
    for name in [name for name in CORES_HELD_OUT if name in (names or SURVIVORS)]:
        found[name] = judge(name)
        print(f"{found[name].seconds:6.1f} s  {name}: {found[name].test or 'SURVIVED'}")
        print(f"{'':10}{found[name].evidence[:200]}", flush=True)
    killers = sorted({verdict.test for verdict in found.values() if verdict.test})
    alarm = judge(None, killers) if killers else None
    if alarm is not None and alarm.test:
        sys.exit(f"{alarm.test} fails on the core without a defect: {alarm.evidence}")
    killed = sum(bool(verdict.test) for verdict in found.values())
    print(f"\n{killed} of {len(found)} found by the tests, all of which pass without a defect")
    if not names:
        text, _, _ = TABLE.read_text(encoding="utf-8").partition(HEADING)
        TABLE.write_text(text + written(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
