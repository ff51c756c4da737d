"""The programs of a fleet, each in a process of its own, on loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

__all__ = ["Frontend", "Program", "Worker", "wait_until"]

START_S = 240.0
"""Longest wait for a program's start: importing torch takes long where others do so, too."""


def wait_until(true: Callable[[], bool], said: Callable[[], object], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


class Program:
    """A process with its log; `with` starts and stops it."""

    def __init__(self, command: Sequence[str | Path], home: Path, name: str) -> None:
        self.command = [*map(str, command)]
        self.home = home
        self.log = home / f"{name}.log"
        self.starts = 0

    def start(self) -> None:
        self.starts += 1
        environment = {
            **os.environ,
            "DYN_FILE_KV": str(self.home / "discovery"),
            "DYN_LOG": "warn",
            "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
            "HF_HUB_OFFLINE": "1",
            "NO_COLOR": "1",
        }
        with self.log.open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def said(self) -> str:
        return self.log.read_text()[-6000:]

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()


class Worker(Program):
    """`kvgraft dynamo-worker`."""

    def __init__(self, model: Path, home: Path, name: str, *options: str) -> None:
        kvgraft = Path(sys.executable).with_name("kvgraft")
        sizes = ("--device-tokens", "8k", "--host-tokens", "8k", "--chunk-tokens", "64")
        settings = (*sizes, "--threads", "1", "--guard", "on", *options)
        super().__init__([kvgraft, "dynamo-worker", model, *settings], home, name)


class Frontend(Program):
    """Dynamo's own frontend, with a router."""

    def __init__(self, mode: str, port: int, home: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        where = ("--http-host", "127.0.0.1", "--http-port", str(port))
        found = ("--discovery-backend", "file", "--event-plane", "zmq")
        more = ("--router-mode", mode, "--migration-limit", "3")
        program = [sys.executable, "-m", "dynamo.frontend"]
        super().__init__([*program, *where, *found, *more], home, f"frontend-{mode}")

    def serves(self, model: str) -> bool:
        """Whether it knows a worker of the model."""
        assert self.process.poll() is None, self.said()
        try:
            listed = httpx.get(f"{self.url}/v1/models", timeout=10).json()
        except httpx.TransportError:
            return False
        return model in [each["id"] for each in listed["data"]]

    def ask(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/{path}", json=body, timeout=120)
