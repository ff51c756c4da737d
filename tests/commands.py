"""Commands of a virtual environment, run as a user runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["KVGRAFT", "ROOT", "run"]

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
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
