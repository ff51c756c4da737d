"""moto's S3 server as a process of its own, and requests to it that do not go through kvgraft."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

__all__ = ["BUCKET", "MotoServer", "free_port", "until_open"]

BUCKET = "pages"
ADDRESS = "127.0.0.1"
SIGNED = "AWS4-HMAC-SHA256 Credential=tests/20261102/us-east-1/s3/aws4_request"
"""Enough for moto, which checks no signatures."""


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as taken:
        taken.bind((ADDRESS, 0))
        port: int = taken.getsockname()[1]
        return port


def until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a process listens."""
    end = time.monotonic() + 60
    while True:
        try:
            socket.create_connection((ADDRESS, port), 1).close()
        except OSError:
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < end, "the server does not listen"
            time.sleep(0.02)
        else:
            return


class MotoServer:
    """A server with one bucket; its content is lost when it is killed.

    Attributes:
        port: on loopback; the same after a restart.
    """

    def __init__(self) -> None:
        pytest.importorskip("moto.server", reason="needs moto[s3], flask and flask-cors")
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", ADDRESS, "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until_open(self.port, self._process)
        self.request("PUT", "")

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
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://{ADDRESS}:{self.port}"

    def url(self, prefix: str = "tests", options: str = "") -> str:
        """A store of kvgraft in its bucket."""
        return f"s3:{BUCKET}/{prefix}?endpoint={self.endpoint}{options}"

    def request(self, verb: str, path: str, content: bytes | None = None) -> bytes:
        """A plain HTTP request about an object, or the bucket."""
        return self.ask(verb, f"/{BUCKET}/{path}".rstrip("/"), content)

    def ask(self, verb: str, path: str, content: bytes | None = None) -> bytes:
        """Any plain HTTP request."""
        asked = urllib.request.Request(
            self.endpoint + path,
            data=content,
            method=verb,
            headers={"Content-Type": "application/octet-stream", "Authorization": SIGNED},
        )
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return bytes(answer.read())
