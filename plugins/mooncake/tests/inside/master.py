"""Mooncake's master as a process of its own, on the ports the backend expects."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

__all__ = ["Master", "program"]

PORT, ADMIN = 50051, 9003


def program() -> str:
    """The master's file in the installed library."""
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.submodule_search_locations is not None
    return str(Path(found.submodule_search_locations[0]) / "mooncake_master")


class Master:
    """A master; its data is lost when it is killed."""

    def __init__(self, *options: str) -> None:
        self._command = [
            program(),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={PORT}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={ADMIN}",
            *options,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + 60
        for port in (PORT, ADMIN):
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port), 1).close()
                except OSError:
                    assert self._process.poll() is None, "the master did not start"
                    assert time.monotonic() < end, "the master does not listen"
                    time.sleep(0.02)
                else:
                    break

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """Keep its connections and answer nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self._process.pid, os.WUNTRACED)  # until all its threads have stopped

    def go_on(self) -> None:
        """Answer again, also if it was killed."""
        if self._process is None:
            self.start()
        else:
            self._process.send_signal(signal.SIGCONT)
