"""`make mutants`: kill every mutant, print the table, keep it in `docs/mutants.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

from ..commands import ROOT
from . import cores_of_requests as _more  # noqa: F401 - fills CORES
from .components import MUTANTS
from .cores import CORES
from .killing import Kill, check_package, find_in_core, first_failure, wrongly_killed
from .legal import LEGAL

HEAD = """# Mutants

Known-bad components and known-bad cores, one defect each, and what finds them. Components are asked
the clauses of `kvgraft check`, those of the state machine last; cores are driven by the state
machine. Written by `make mutants`.

"""


class Row(NamedTuple):
    """A mutant and what became of it."""

    where: str
    defect: str
    rules: tuple[str, ...]
    kill: Kill | None
    seconds: float


def rows() -> Iterator[Row]:
    """Every mutant, killed now."""
    for mutant in MUTANTS:
        start = perf_counter()
        kill = first_failure(mutant.package)
        yield Row("component", mutant.name, mutant.rules, kill, perf_counter() - start)
    for name, core in CORES.items():
        start = perf_counter()
        kill = find_in_core(core)
        defect = name.replace("_", " ")
        yield Row("core", defect, core.rules, kill, perf_counter() - start)


def written(found: list[Row]) -> str:
    """The table as a document; times are left out, so that it changes with the suite alone."""
    lines = [HEAD, "| where | defect | rule named | by |\n|---|---|---|---|\n"]
    for row in found:
        rule, by = (row.kill.rule, row.kill.by) if row.kill is not None else ("", "survived")
        lines.append(f"| {row.where} | {row.defect} | {rule} | {by} |\n")
    families = sorted({row.kill.rule[0] for row in found if row.kill is not None})
    lines.append(f"\n{len(found)} mutants; families named: {' '.join(families)}.\n")
    lines.append("\nUnusual components that keep the contract, and pass every clause:\n\n")
    lines += [f"- {name}\n" for name in LEGAL]
    return "".join(lines)


def main() -> None:
    found, wrong = [], []
    for row in rows():
        problem = wrongly_killed(row.kill, row.rules)
        told = row.kill.rule if row.kill is not None else "-"
        print(f"{row.seconds:6.1f} s  {told:>4}  {row.where:<9}  {row.defect}", flush=True)
        found.append(row)
        if problem is not None:
            wrong.append(f"{row.defect}: {problem}")
    for name, package in LEGAL.items():
        start = perf_counter()
        alarms = [result for result in check_package(package) if result.bad]
        print(f"{perf_counter() - start:6.1f} s     -  legal      {name}", flush=True)
        wrong += [f"false alarm, {name}: {each.rule}: {each.evidence}" for each in alarms]
    killed = sum(row.kill is not None for row in found)
    print(f"\n{killed} of {len(found)} killed, {len(LEGAL)} legal ones looked at")
    for problem in wrong:
        print(f"WRONG  {problem}")
    if wrong:
        sys.exit(1)
    (ROOT / "docs" / "mutants.md").write_text(written(found), encoding="utf-8")


if __name__ == "__main__":
    main()
