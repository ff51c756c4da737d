"""The small engine beside the suite and without it; differences of their notes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvgraft.errors import ContractViolation
from kvgraft.packages.dispatch import HOOK_RESULTS
from kvgraft.packages.registry import Plugin
from kvgraft_testing.machine.judging import HOOK_RULES
from kvgraft_testing.process import packed
from kvgraft_testing.production import engine
from kvgraft_testing.production.engine import Seen
from kvgraft_testing.production.surroundings import environment, hidden

__all__ = ["Run", "apart", "beside"]

TIMEOUT_S = 300.0
"""Seconds after which a process is ended: far more than it needs on a busy machine."""

NAME = "serving_engine"
"""The name of the engine's copy."""

LONGEST = 300
"""Characters of a note that are shown."""


class Run(NamedTuple):
    """The engine's notes.

    Attributes:
        notes: in the order in which they were written.
        error: the last line of the process's output, if it had a process of its own.
    """

    notes: tuple[Seen, ...]
    error: str = ""

    def finding(self, component: str) -> ContractViolation | None:
        """The finding that leaves all else undecided: a process that ended, a hook that blocks."""
        blocked = [note for note in self.notes if note.kind == "blocked"]
        if blocked:
            _, hook, said = blocked[0]
            bound = f"a hook takes microseconds, {engine.BLOCKS_S} s are allowed"
            return ContractViolation("P9", component, f"{hook} blocks: {said}; {bound}")
        for at, note in enumerate(self.notes):
            if note.kind == "forked":
                asked = [each.done for each in self.notes[:at] if each.kind == "calling"]
                return ContractViolation("P10", component, f"{asked[-1]} forks the process")
        if not any(note.kind == "end" for note in self.notes):
            asked = [note.done for note in self.notes if note.kind == "calling"]
            last = asked[-1] if asked else "the import"
            said = f": {self.error}" if self.error else ""
            return ContractViolation("P10", component, f"the process ended in {last}{said}")
        return None

    def refused(self, component: str) -> ContractViolation | None:
        """The first hook that raised, or returned a wrong type."""
        for kind, hook, said in self.notes:
            if kind == "raised":
                return ContractViolation(HOOK_RULES.get(hook, "I8"), component, said)
            if kind == "form":
                expected = HOOK_RESULTS.get(hook)
                rule = expected.rule if expected is not None else "L3"
                return ContractViolation(rule, component, said)
        return None

    def difference(self, other: Run, here: str, there: str) -> str | None:
        """The first difference to another run; None if there is none."""
        mine, others = self._compared(), other._compared()
        for one, two in zip(mine, others):
            if one.done != two.done:
                return f"{_cut(one.done)} {here}, {_cut(two.done)} {there}"
            if one != two:
                return f"{_cut(one.done)}: {_cut(one.came)} {here}, {_cut(two.came)} {there}"
        if len(mine) != len(others):
            longer, where = (mine, here) if len(mine) > len(others) else (others, there)
            return f"{_cut(longer[min(len(mine), len(others))].done)} only {where}"
        return None

    def difference_by_cache(self, other: Run) -> str | None:
        """The first different answer in another run, with several caches at once; None if none."""
        mine, others = self._by_cache(), other._by_cache()
        for where in mine.keys() & others.keys() - {""}:
            for one, two in zip(mine[where], others[where]):
                if one != two:
                    came = f"{_cut(one.came)} in a process of its own, {_cut(two.came)}"
                    return f"{where}: {_cut(one.done)}: {came} beside caches of other sizes"
        return None

    def _by_cache(self) -> dict[str, list[Seen]]:
        """The notes about each cache."""
        found: dict[str, list[Seen]] = {"": []}
        where = ""
        for note in self._compared():
            if note.kind == "cache":
                where = note.done
            found.setdefault(where, []).append(note)
        return found

    def _compared(self) -> list[Seen]:
        return [
            note for note in self.notes if note.kind not in ("calling", "blocked", "forked", "end")
        ]


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def beside(plugin: Plugin, options: Mapping[str, Any]) -> Run:
    """Run the engine here, where the suite is imported."""
    notes: list[Seen] = []
    engine.watch(plugin, options, lambda *note: notes.append(Seen(*note)))
    return Run(tuple(notes))


def apart(plugin: Plugin, options: Mapping[str, Any], *, together: bool = False) -> Run:
    """Run the engine where there is no suite; `together` with several caches at once.

    An installed component has a process of its own. One that was given as an object stays in this
    one, with the suite out of its sight.
    """
    with _copied() as directory:
        if plugin.distribution:
            return _in_a_process(directory, plugin.name, options, together=together)
        notes: list[Seen] = []
        with hidden(), _loaded(directory / NAME) as copy:
            watch = copy.watch_together if together else copy.watch
            watch(plugin, options, lambda *note: notes.append(Seen(*note)))
        return Run(tuple(notes))


@contextmanager
def _copied() -> Iterator[Path]:
    """A folder with the engine under an ordinary name: no frame or argument tells of the suite."""
    with tempfile.TemporaryDirectory(prefix="") as directory:
        folder = Path(directory) / NAME
        folder.mkdir()
        for path in Path(engine.__file__).parent.glob("*.py"):
            text = path.read_text(encoding="utf-8").replace(engine.__name__, NAME)
            (folder / path.name).write_text(text, encoding="utf-8")
        yield Path(directory)


@contextmanager
def _loaded(folder: Path) -> Iterator[Any]:
    """The copy, imported for a while."""
    spec = importlib.util.spec_from_file_location(
        NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] == NAME]:
            del sys.modules[name]


def _in_a_process(directory: Path, name: str, options: Mapping[str, Any], *, together: bool) -> Run:
    job = json.dumps({"name": name, "options": packed(options), "together": together})
    process = subprocess.Popen(
        [sys.executable, "-m", NAME],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(str(directory)),
        start_new_session=True,
    )
    try:
        out, error = process.communicate(job + "\n", timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        out, error = "", f"nothing was heard for {TIMEOUT_S:.0f} s"
    lines = error.strip().splitlines()
    notes = tuple(Seen(*note) for note in map(_read, out.splitlines()) if note is not None)
    return Run(notes, lines[-1] if lines else "")


def _read(line: str) -> list[str] | None:
    """A note; None if the line is none, such as one that was cut off."""
    try:
        note = json.loads(line)
    except ValueError:
        return None
    return note if isinstance(note, list) and len(note) == len(Seen._fields) else None
