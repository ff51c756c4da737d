"""A `kvgraft serve` process on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import httpx
import openai

__all__ = ["Server", "kvgraft"]

START_S = 120

OFFLINE = {"HF_HUB_OFFLINE": "1"}


def kvgraft(*arguments: str | Path) -> list[str]:
    """The installed command."""
    return [str(Path(sys.executable).with_name("kvgraft")), *map(str, arguments)]


class Server:
    """A server process; `with` starts and stops it."""

    def __init__(
        self, model: Path | str, *options: str, log: Path, environment: Mapping[str, str] = OFFLINE
    ) -> None:
        self.command = kvgraft("serve", model, "--port", "0", "--threads", "1", *options)
        self.log = log
        self.environment = environment
        self.url = ""

    def __enter__(self) -> Server:
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self.command,
                stderr=log,
                stdout=log,
                env={**os.environ, "NO_COLOR": "1", **self.environment},
            )
        deadline = time.monotonic() + START_S
        while not self.url:
            found = re.search(r"on (http://\S+)/v1", self.log.read_text())
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            if found:
                self.url = found[1]
            else:
                time.sleep(0.05)
        while True:
            try:
                httpx.get(f"{self.url}/health")
                return self
            except httpx.TransportError:
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """Interrupt it, as Ctrl-C does; its status once it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(30)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, by its name and labels."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        samples = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in samples}

    def wait_until_nothing_is_held(self) -> dict[str, float]:
        """Wait for the metrics to say that no request is left and no slot private or pinned."""
        deadline = time.monotonic() + 60
        while True:
            metrics = self.metrics()
            held = {
                name: value
                for name, value in metrics.items()
                if value and (("_requests" in name and "_total" not in name) or 'owner="p' in name)
            }
            if not held:
                return metrics
            assert time.monotonic() < deadline, held
            time.sleep(0.05)
