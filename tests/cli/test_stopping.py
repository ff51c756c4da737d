"""A command that is told to stop leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ..commands import KVGRAFT


def busy_children(pid: int) -> list[str]:
    """Processes that one has started, once they have computed for a while."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in found if ticks(child) >= 20]


def ticks(pid: str) -> int:
    """Processor time of a process, in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)]
)
def test_a_check_that_is_stopped_ends_its_process_first(
    number: signal.Signals, status: int
) -> None:
    # A process started in the background ignores SIGINT, and so would its children.
    command = [
        sys.executable,
        "-c",
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        "os.execv(sys.argv[1], sys.argv[1:])",
        *(KVGRAFT, "check", "full", "--profile", "nightly"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as check:
        end = time.monotonic() + 60
        while not (workers := busy_children(check.pid)):
            assert time.monotonic() < end, "it started no process that does anything"
            time.sleep(0.01)
        check.send_signal(number)
        assert check.wait(60) == status
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)
