"""Imports the compiled modules of a folder in one fresh process, and names one that crashes it.

    python -m tests.compiled build/compiled

A defect of compiled code may end the process, and would then end a run of tests as a whole while it
collects them.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

__all__ = ["modules_in", "why_not_imported"]

IMPORTING = """
import importlib, sys
from importlib.machinery import ExtensionFileLoader, SourceFileLoader

def told(work):
    def telling(loader, about):
        print("begins", loader.name, flush=True)
        done = work(loader, about)
        print("ends", loader.name, flush=True)
        return done
    return telling

for loader in ExtensionFileLoader, SourceFileLoader:
    for name in "create_module", "exec_module":
        setattr(loader, name, told(getattr(loader, name)))
sys.path.insert(0, sys.argv[1])
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def modules_in(folder: Path) -> list[str]:
    """Names of the extension modules in a folder."""
    (suffix, *_) = EXTENSION_SUFFIXES
    return sorted(
        ".".join(path.relative_to(folder).parts).removesuffix(suffix)
        for path in folder.rglob(f"*{suffix}")
    )


def why_not_imported(folder: Path, modules: Sequence[str]) -> str | None:
    """A line that names the module which failed and says how; None if all can be imported."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, str(folder), *modules],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if not done.returncode:
        return None
    begun = [folder.name]
    for line in done.stdout.splitlines():
        said, _, name = line.partition(" ")
        if said == "begins":
            begun.append(name)
        elif said == "ends":
            begun.pop()
    last = (done.stderr.splitlines() or ["the process said nothing"])[-1]
    return f"import of {begun[-1]} ended with exit status {done.returncode}: {last}"


def main() -> None:
    folder = Path(sys.argv[1])
    modules = modules_in(folder)
    if not modules:
        sys.exit(f"{folder}: no compiled module")
    failure = why_not_imported(folder, modules)
    if failure is not None:
        sys.exit(failure)
    sys.stdout.write(f"{len(modules)} compiled modules can be imported\n")


if __name__ == "__main__":
    main()
