"""Python programs in forks of a process that has imported torch and the command already.

Most of a short program's time goes into imports. A fork has them, and is a process of its own all
the same: with its arguments, environment, directory, output and exit status.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

__all__ = ["PRELOADED", "run_program"]

PRELOADED = ["kvgraft_cli", "kvgraft_replay.command", "kvgraft_replay.replay", "tests.forking"]
"""Modules that are imported before the first fork."""


def run_program(
    arguments: Sequence[str], directory: str, environment: Mapping[str, str], outputs: Sequence[str]
) -> None:
    """Become `python ARGUMENTS` in this process.

    Args:
        arguments: `-c` and code, `-m` and a module, or a script; and its arguments.
        directory: the directory it runs in.
        environment: all of its environment.
        outputs: paths that standard output and standard error are written to.
    """
    for descriptor, path in enumerate([os.devnull, *outputs]):
        opened = os.open(path, os.O_RDWR)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)  # multiprocessing has replaced it
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    first, *rest = arguments
    is_script = first not in ("-c", "-m")
    more = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [str(Path(first).parent) if is_script else "", *more, *sys.path]
    sys.argv = [first, *rest[not is_script :]]
    if first == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(first, run_name="__main__")
