"""Ranks as processes, each with another hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..commands import ROOT

__all__ = ["Ranks"]


class Ranks:
    """Processes of a group that run the same jobs; use it as a context."""

    def __init__(self, n_ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        folder = self._folder.name
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.ranks.process", str(rank), str(n_ranks), folder],
                cwd=ROOT,
                env=os.environ | {"PYTHONHASHSEED": str(rank + 1), "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(n_ranks)
        ]
        self.folder = Path(folder)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()
        self._folder.cleanup()

    def run(self, job: dict[str, Any], of: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Run a job on all ranks; the results of all, or of some that outlive it."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        ranks = range(len(self._processes)) if of is None else of
        results = []
        for rank in ranks:
            stdout = self._processes[rank].stdout
            assert stdout is not None
            line = stdout.readline()
            assert line, f"rank {rank} ended without a result"
            results.append(json.loads(line))
        return results
