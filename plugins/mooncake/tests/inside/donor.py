"""A process whose memory a store may use, until it is killed: `python donor.py URL`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvgraft_storage import open_storage

__all__ = ["Donor"]


class Donor:
    """Such a process; returns once its memory is there."""

    def __init__(self, segment: str) -> None:
        url = f"mooncake:127.0.0.1/donor?segment={segment}"
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    store = open_storage(sys.argv[1])
    print("ready", flush=True)  # noqa: T201 - its parent waits for it
    sys.stdin.read()
