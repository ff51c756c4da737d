"""Commands of a virtual environment, run as a user runs them."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from .forking import PRELOADED, run_program

__all__ = ["KVGRAFT", "ROOT", "run", "run_forked"]

ROOT = Path(__file__).parents[1]
"""The repository."""

KVGRAFT = str(Path(sys.executable).with_name("kvgraft"))
"""The installed command."""


def run(
    *command: str | Path, cwd: Path | None = None, timeout_s: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, for any exit status, without colours."""
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run_forked(
    *arguments: str | Path,
    cwd: Path | None = None,
    timeout_s: float = 120,
    **environment: str | None,
) -> subprocess.CompletedProcess[str]:
    """As `run(sys.executable, *arguments)`, with torch and the command imported before it begins.

    Not for a test about imports, or of signals and outputs that are closed or full: use `run`.

    Args:
        arguments: KVGRAFT or another script, or `-c` and code; and the arguments of that.
        cwd: the directory it runs in.
        timeout_s: after that long it is killed.
        environment: more of it; None leaves a variable out.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    given = [str(part) for part in arguments]
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    with tempfile.NamedTemporaryFile("r") as output, tempfile.NamedTemporaryFile("r") as errors:
        outputs = [output.name, errors.name]
        process = forks.Process(
            target=run_program,
            args=(given, str(cwd or Path.cwd()), _environment(environment), outputs),
        )
        process.start()
        process.join(timeout_s)
        status = process.exitcode
        if status is None:
            process.kill()
            process.join()
        process.close()
        if status is None:
            raise subprocess.TimeoutExpired(given, timeout_s)
        return subprocess.CompletedProcess(given, status, output.read(), errors.read())


def _environment(more: Mapping[str, str | None]) -> dict[str, str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **more}
    return {name: value for name, value in environment.items() if value is not None}
