"""A real browser, headless: Chromium, spoken to through its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["CHROMIUM", "Browser"]

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
"""The browser; None where there is none."""

WAIT_S = 60.0


class Browser:
    """One page of Chromium; `with` starts and ends it.

    Args:
        profile: an empty directory for its files.

    Attributes:
        requested: addresses that the page asked for.
        complaints: errors that its scripts threw or logged.
    """

    def __init__(self, profile: Path) -> None:
        self.profile = profile
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._number = 0
        self._session: str | None = None
        self._rest = b""

    def __enter__(self) -> Browser:
        assert CHROMIUM is not None
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--no-first-run", f"--user-data-dir={self.profile}", "--remote-debugging-pipe"]
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{answers}', "bash", CHROMIUM, *options],
            pass_fds=(theirs, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)
        os.close(self._to)
        os.close(self._from)

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, script: str, right: Callable[[Any], bool] = bool) -> Any:
        """The value of an expression once it is right."""
        deadline = time.monotonic() + WAIT_S
        while not right(value := self.run(script)):
            assert time.monotonic() < deadline, f"{script}: {value!r}"
            time.sleep(0.05)
        return value

    def picture(self, path: Path) -> None:
        """Write what it shows to a PNG file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of its debugging protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requested.append(about["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(about["exceptionDetails"]["text"])
        elif event.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.complaints.append(about["entry"]["text"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._from, 2**16)
            assert part, "the browser has ended"
            self._rest += part
        message, _, self._rest = self._rest.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer
