"""Processes that run SGLang's HiCache over a store, or its scheduling, one after the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["Lives", "damage_a_page"]

ROOT = Path(__file__).parents[4]


class Lives:
    """Processes that have imported SGLang: forks of one, which costs seconds once.

    Args:
        errors: the file that their standard error goes to.
        module: the module beside this one that they run.
    """

    def __init__(self, errors: Path, module: str = "life") -> None:
        self._errors = errors.open("a+")
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", f"plugins.sglang.tests.engine.{module}"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def __call__(
        self,
        extra: dict[str, Any],
        *steps: Sequence[Any],
        layout: str = "page_first",
        pool: str = "mha",
        tp: tuple[int, int] = (0, 1),
        storage: str = "dynamic",
    ) -> list[Any]:
        """Results of the steps of one process."""
        own = {"weights": "one", "interface_v1": 1, **extra}
        given = {"extra": own, "layout": layout, "pool": pool, "tp": tp, "storage": storage}
        return self.ask({**given, "steps": steps})

    def ask(self, given: dict[str, Any]) -> list[Any]:
        """The list with which a process answers."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        requests.write(json.dumps(given) + "\n")
        requests.flush()
        lines: list[str] = []
        while not lines or lines[-1].startswith("["):
            lines.append(answers.readline())
        assert lines[-1] == "0\n", self.said
        results: list[Any] = json.loads(lines[-2])
        return results

    @property
    def said(self) -> str:
        """All that they wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._errors.close()


def damage_a_page(files: Sequence[Path]) -> None:
    """Turn a bit of a payload: the last one of the longest file, which is zeros behind it."""
    written = {each: each.read_bytes().rstrip(b"\0") for each in files}
    longest = max(written, key=lambda each: len(written[each]))
    place = len(written[longest]) - 1000
    with longest.open("r+b") as file:
        file.seek(place)
        file.write(bytes([written[longest][place] ^ 1]))
