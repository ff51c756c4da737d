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

__all__ = ["KVGRAFT", "ROOT", "Forked", "run", "run_forked", "storage_command"]

ROOT = Path(__file__).parents[1]
"""The repository."""

KVGRAFT = str(Path(sys.executable).with_name("kvgraft"))
"""The installed command."""


def run(
    *command: str | Path, cwd: Path | None = None, timeout_s: float = 120, **environment: str | None
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

    Not for a test about imports, of signals and outputs that are closed or full, or of pytest in
    several processes: use `run`.

    Args:
        arguments: KVGRAFT or another script, `-c` and code, or `-m` and a module; and more.
        cwd: the directory it runs in.
        timeout_s: after that long it is killed.
        environment: more of it; None leaves a variable out.

    Raises:
        subprocess.TimeoutExpired: it took longer.
    """
    return Forked(*arguments, cwd=cwd, **environment).ended(timeout_s)


def storage_command(*arguments: str) -> tuple[int, str]:
    """Exit status and output of `kvgraft storage`, in this process."""
    from click.testing import CliRunner

    from kvgraft_storage.command import storage

    done = CliRunner().invoke(storage, list(arguments), env={"COLUMNS": "250"})
    return done.exit_code, done.output


class Forked:
    """A program that runs in a fork; see `run_forked`."""

    def __init__(
        self, *arguments: str | Path, cwd: Path | None = None, **environment: str | None
    ) -> None:
        self.arguments = [str(part) for part in arguments]
        self._outputs = [tempfile.NamedTemporaryFile("r") for _ in range(2)]  # noqa: SIM115
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(PRELOADED)
        self._process = forks.Process(
            target=run_program,
            args=(
                self.arguments,
                str(cwd or Path.cwd()),
                _environment(environment),
                [output.name for output in self._outputs],
            ),
        )
        self._process.start()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()

    def ended(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Its status and outputs, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it had not ended after so many seconds, and was killed.
        """
        self._process.join(timeout_s)
        status = self._process.exitcode
        if status is None:
            self.kill()
            self._process.join()
        self._process.close()
        output, errors = (file.read() for file in self._outputs)
        for file in self._outputs:
            file.close()
        if status is None:
            raise subprocess.TimeoutExpired(self.arguments, timeout_s, output, errors)
        return subprocess.CompletedProcess(self.arguments, status, output, errors)


def _environment(more: Mapping[str, str | None]) -> dict[str, str]:
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **more}
    return {name: value for name, value in environment.items() if value is not None}
