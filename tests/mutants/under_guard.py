"""`python -m tests.mutants.under_guard [NAME...]`: bad cores under busy replays, the guard alone.

Each is patched into the source as it is imported, in a process of its own. A kill is an error of
the guard, with its rule; faults that the replay itself notices, such as wrong bytes, do not count.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from .guarded_cores import GUARDED_CORES, BadCore

__all__ = ["Verdict", "judge", "main", "written"]

ROOT = Path(__file__).parents[2]
CORE = ROOT / "core" / "src" / "kvgraft"
PLUGINS = sorted(ROOT.glob("plugins/*/src"))
GUARD = ROOT / "plugins" / "guard" / "src" / "kvgraft_guard"
LONGEST_S = 240.0
NAMES = ("drawn", "strained", "sessions", "stored", "windows")
TABLE = ROOT / "docs" / "guard-mutants.md"

HEAD = """# Bad cores under the guard

One line of the core replaced at a time, in busy replays with the guard on
(`tests/mutants/busy_replays.py`). Faults that the replay itself notices, such as wrong bytes, do
not count, nor do errors that the core raises without a guard. Written by `make mutants`.

"""


class Verdict(NamedTuple):
    """The outcome of a bad core.

    Attributes:
        rule: the rule the guard named; empty if it was silent.
        replay: in which replay.
        evidence: the error raised, by the guard or by others.
    """

    rule: str
    replay: str
    evidence: str
    seconds: float

    @property
    def killed(self) -> bool:
        return bool(self.rule)


class _Patched(importlib.machinery.SourceFileLoader):
    """Loads one module with a text replaced."""

    def __init__(self, fullname: str, path: str, core: BadCore) -> None:
        super().__init__(fullname, path)
        self.core = core

    def get_code(self, fullname: str) -> CodeType | None:
        source = Path(self.path).read_text(encoding="utf-8")
        return self.source_to_code(patched(source, self.core).encode(), self.path)


def source_of(core: BadCore) -> Path:
    """The file that a bad core replaces."""
    return (ROOT if core.module.startswith("plugins/") else CORE) / core.module


def patched(source: str, core: BadCore) -> str:
    """The module's source with the defect in it."""
    if source.count(core.old) != 1:
        raise LookupError(
            f"{core.module}: {core.old!r} stands there {source.count(core.old)} times"
        )
    return source.replace(core.old, core.new)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, core: BadCore) -> None:
        self.core = core
        self.path = source_of(core)
        (below,) = (each for each in (CORE.parent, *PLUGINS) if self.path.is_relative_to(each))
        dotted = ".".join(self.path.relative_to(below).with_suffix("").parts)
        self.name = dotted.removesuffix(".__init__")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        where = str(self.path)
        loader = _Patched(fullname, where, self.core)
        return importlib.util.spec_from_file_location(fullname, where, loader=loader)


def _by_the_guard(error: BaseException) -> bool:
    """Whether the guard raised it, or the recomputation of the books that it asked for."""
    frames = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    books = GUARD / "integrity.py"
    guard = [at for at, path in enumerate(frames) if path.parent == GUARD and path != books]
    checks = [at for at, path in enumerate(frames) if path == books]
    if not guard:
        return False
    asked = any(
        frame.name == "_check_all" and Path(frame.filename).parent == GUARD
        for frame in traceback.extract_tb(error.__traceback__)
    )
    return guard[-1] == len(frames) - 1 or asked or bool(checks)


def _child(core: BadCore | None, name: str, answer: Any) -> None:
    """Play one replay with the defect in; its own process."""
    try:
        if core is not None:
            sys.meta_path.insert(0, _Finder(core))
        from kvgraft.errors import ContractViolation

        from . import busy_replays

        try:
            noticed = busy_replays.play(name)
        except ContractViolation as error:
            rule = error.rule if _by_the_guard(error) else ""
            answer.send((rule, str(error) if rule else f"core itself: {error}"))
        else:
            answer.send(("", f"replay: {noticed}" if noticed else ""))
    except BaseException as error:  # noqa: BLE001 - told to the parent
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        answer.send(("", f"{type(error).__name__} at {where}: {error}"))
    finally:
        answer.close()


def _play(core: BadCore | None, name: str) -> tuple[str, str]:
    context = multiprocessing.get_context("fork")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(core, name, its))
    process.start()
    its.close()
    found = ("", f"no end in {LONGEST_S:.0f} s")
    try:
        if mine.poll(LONGEST_S):
            found = mine.recv()
    except EOFError:
        found = ("", "the process died")
    process.join(1.0)
    if process.is_alive():
        process.kill()
        process.join()
    return found


def judge(core: BadCore | None, names: Iterable[str] = NAMES) -> Verdict:
    """Play the replays until the guard names a rule; None for a core without a defect."""
    start, said = perf_counter(), []
    for name in names:
        rule, evidence = _play(core, name)
        if rule:
            return Verdict(rule, name, evidence, perf_counter() - start)
        if evidence:
            said.append(f"{name}: {evidence}")
    return Verdict("", "", "; ".join(said), perf_counter() - start)


def verdicts(
    cores: dict[str, BadCore], names: Iterable[str] = NAMES
) -> Iterator[tuple[str, BadCore, Verdict]]:
    """Two at a time, in order."""
    import torch  # once for all children, before they are forked

    torch.set_num_threads(1)
    with ThreadPoolExecutor(2) as pool:
        yield from zip(cores, cores.values(), pool.map(partial(judge, names=names), cores.values()))


def written(found: Iterable[tuple[str, BadCore, Verdict]]) -> str:
    """The table as a document; times are left out, so that it changes with the guard alone."""
    rows = list(found)
    lines = [HEAD, "| defect | breaks | the guard names |\n|---|---|---|\n"]
    for name, core, verdict in rows:
        lines.append(f"| {name} | {' '.join(core.rules)} | {verdict.rule or 'nothing'} |\n")
    killed = sum(verdict.killed for _, _, verdict in rows)
    lines.append(f"\n{killed} of {len(rows)} are found by the guard alone.\n")
    return "".join(lines)


def main(given: Sequence[str]) -> None:
    """Judge the cores named, or all and write the table; `in=drawn` in this replay alone."""
    names = [each for each in given if not each.startswith("in=")]
    replays = [each.removeprefix("in=") for each in given if each.startswith("in=")] or NAMES
    cores = {name: core for name, core in GUARDED_CORES.items() if not names or name in names}
    found = []
    for name, core, verdict in verdicts(cores, replays):
        found.append((name, core, verdict))
        wrong = verdict.killed and verdict.rule not in core.rules
        print(f"{verdict.seconds:6.1f} s  {verdict.rule or '-':>4}  {name}{' *' if wrong else ''}")
        print(f"{'':16}{verdict.evidence[:200]}", flush=True)
    killed = sum(verdict.killed for _, _, verdict in found)
    print(f"\n{killed} of {len(found)} found by the guard alone; *: under a rule not foreseen")
    if not names:
        TABLE.write_text(written(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
