"""`make mutants`: kill every mutant, print the table, keep it in `docs/mutants.md`.

Names as arguments choose mutants: the others that the document knows keep their rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

from . import cores_of_budgets as _budgets  # noqa: F401 - fills CORES
from . import cores_of_drafts as _drafts  # noqa: F401 - fills CORES
from . import cores_of_events as _events  # noqa: F401 - fills CORES
from . import cores_of_keeping as _keeping  # noqa: F401 - fills CORES
from . import cores_of_newer_parts as _newer  # noqa: F401 - fills CORES
from . import cores_of_points as _points  # noqa: F401 - fills CORES
from . import cores_of_refusals as _refusals  # noqa: F401 - fills CORES
from . import cores_of_requests as _more  # noqa: F401 - fills CORES
from . import cores_of_sharing as _sharing  # noqa: F401 - fills CORES
from . import cores_of_storing as _storing  # noqa: F401 - fills CORES
from .by_tests import HEADING, TABLE
from .components import MUTANTS
from .components_held_out import COMPONENTS_HELD_OUT
from .cores import CORES
from .cores_held_out import CORES_HELD_OUT
from .killing import Kill, check_package, find_in_core, first_failure, wrongly_killed
from .legal import LEGAL
from .survivors import SURVIVORS

HEAD = """# Mutants

Known-bad components and known-bad cores, one defect each, and the checks that find them. Components
are asked the clauses of `kvgraft check`, those of the state machine last; cores are driven by the
state machine. Written by `make mutants`.

"""

APART = """
## Written apart from the suite

Defects written without a look at the suite or at the table above, killed in the same way. A mutant
listed as survived, or under a rule that it does not break, is in `tests/mutants/survivors.py`.

"""

ENGINES = """
## Engines with a draft layer

The contract does not see which token an entry of a draft model was computed with (G5): no core and
no component can be wrong about it, an engine can. The tests of
[examples/draft_layer](../examples/draft_layer) compare every entry that is read, and find engines
that

1. write an entry at the position of its hidden state;
2. do so, and write it anew in a page that others share when they resume behind it;
3. keep the entries of verified drafts, of hidden states of the draft model;
4. leave a page without the hidden state of its last token.
"""

COLUMNS = "| where | defect | rule named | by |\n|---|---|---|---|\n"


class Row(NamedTuple):
    """A mutant and its outcome."""

    where: str
    defect: str
    rules: tuple[str, ...]
    kill: Kill | None
    seconds: float


Known = dict[tuple[str, str], Kill | None]
"""The outcome of mutants that are not killed anew, by where and defect."""


def known_but(names: Sequence[str]) -> Known:
    """The rows of the document without those of some names."""
    text, _, _ = TABLE.read_text(encoding="utf-8").partition(HEADING)
    found: Known = {}
    for where, defect, rule, by in re.findall(
        r"^\| (c\w+) \| (.+) \| (.*) \| (.+) \|$", text, re.M
    ):
        if defect not in names:
            found[where, defect] = Kill(rule, by, "") if rule else None
    return found


def _row(
    where: str, defect: str, rules: tuple[str, ...], known: Known, kill: Callable[[], Kill | None]
) -> Row:
    start = perf_counter()
    found = known[where, defect] if (where, defect) in known else kill()
    return Row(where, defect, rules, found, perf_counter() - start)


def rows(known: Known) -> Iterator[Row]:
    """Every mutant, killed now unless it is known."""
    for mutant in MUTANTS:
        kill = partial(first_failure, mutant.package)
        yield _row("component", mutant.name, mutant.rules, known, kill)
    for name, core in CORES.items():
        yield _row("core", name.replace("_", " "), core.rules, known, partial(find_in_core, core))


def rows_held_out(known: Known) -> Iterator[Row]:
    """The same of every mutant written apart from the suite."""
    for mutant in COMPONENTS_HELD_OUT:
        kill = partial(first_failure, mutant.package)
        yield _row("component", mutant.name, mutant.rules, known, kill)
    for name, core in CORES_HELD_OUT.items():
        yield _row("core", name, core.rules, known, partial(find_in_core, core))


def _listed(found: list[Row]) -> Iterator[str]:
    yield COLUMNS
    for row in found:
        rule, by = (row.kill.rule, row.kill.by) if row.kill is not None else ("", "survived")
        yield f"| {row.where} | {row.defect} | {rule} | {by} |\n"


def _rates(found: list[Row]) -> str:
    said = []
    for where in ("component", "core"):
        own = [row for row in found if row.where == where]
        killed = sum(wrongly_killed(row.kill, row.rules) is None for row in own)
        share = 100 * killed / len(own)
        said.append(f"{killed} of {len(own)} {where}s ({share:.0f} %)")
    return f"Killed under a rule they break: {' and '.join(said)}.\n"


def written(found: list[Row], apart: list[Row]) -> str:
    """The tables as a document; times are left out, so that it changes with the suite alone."""
    lines = [HEAD, *_listed(found)]
    families = sorted({row.kill.rule[0] for row in found if row.kill is not None})
    lines.append(f"\n{len(found)} mutants; families named: {' '.join(families)}.\n")
    lines.append("\nUnusual components that keep the contract, and pass every clause:\n\n")
    lines += [f"- {name}\n" for name in LEGAL]
    lines += [ENGINES, APART, *_listed(apart), "\n", _rates(apart)]
    return "".join(lines)


def _told(row: Row, wrong: list[str]) -> Row:
    """The row, printed, and noted where it is not as expected."""
    problem = wrongly_killed(row.kill, row.rules)
    told = row.kill.rule if row.kill is not None else "-"
    print(f"{row.seconds:6.1f} s  {told:>4}  {row.where:<9}  {row.defect}", flush=True)
    if problem is not None and row.defect not in SURVIVORS:
        wrong.append(f"{row.defect}: {problem}")
    if problem is None and row.defect in SURVIVORS:
        wrong.append(f"{row.defect}: killed now, take it out of SURVIVORS")
    return row


def main(names: Sequence[str]) -> None:
    """Kill the mutants named, and those that the document lacks; without names all of them."""
    wrong: list[str] = []
    known = known_but(names) if names else {}
    found = [_told(row, wrong) for row in rows(known)]
    apart = [_told(row, wrong) for row in rows_held_out(known)]
    for name, package in () if names else LEGAL.items():
        start = perf_counter()
        alarms = [result for result in check_package(package) if result.bad]
        print(f"{perf_counter() - start:6.1f} s     -  legal      {name}", flush=True)
        wrong += [f"false alarm, {name}: {each.rule}: {each.evidence}" for each in alarms]
    killed = sum(row.kill is not None for row in [*found, *apart])
    print(f"\n{killed} of {len(found) + len(apart)} killed, {len(LEGAL)} legal ones looked at")
    for problem in wrong:
        print(f"WRONG  {problem}")
    if wrong:
        sys.exit(1)
    _, heading, by_tests = TABLE.read_text(encoding="utf-8").partition(HEADING)
    TABLE.write_text(written(found, apart) + heading + by_tests, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
