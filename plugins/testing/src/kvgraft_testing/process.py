"""The suite in a process of its own, which answers over pipes.

If a component's code does harm there, such as ending the process, replacing standard output or a
test framework's functions, an answer is missing, and the calling process reports that.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from typing import IO, Any

from kvgraft.errors import ConfigError
from kvgraft.packages.registry import expect_installed
from kvgraft_testing.result import Result, Status
from kvgraft_testing.rules import RULES
from kvgraft_testing.suite import Suite

__all__ = ["SuiteProcess", "Unusable", "packed", "python_path"]

ENDED = "P10"
"""The rule that a component breaks by ending the process."""

GRACE_S = 5.0


class Unusable(Exception):  # noqa: N818 - a result, not an error
    """The component cannot be loaded or built; `result` says why."""

    def __init__(self, result: Result) -> None:
        super().__init__(result.evidence)
        self.result = result


def python_path() -> str:
    """The import path of this process, for `PYTHONPATH`."""
    return os.pathsep.join(os.path.abspath(part) for part in sys.path)


def packed(options: Mapping[str, Any]) -> str:
    """Options as text for another process.

    Raises:
        ConfigError: an option that only this process knows.
    """
    try:
        return base64.b64encode(pickle.dumps(dict(options))).decode()
    except Exception as error:
        raise ConfigError(
            f"options {dict(options)!r} cannot be given to another process ({error}); "
            "give plain values"
        ) from error


class SuiteProcess(Suite):
    """The clauses over an installed component, decided in another process.

    Args:
        name: the component.
        options: its options, as text or values.
        profile: how hard the state machine looks.
        expected_failures: rules it is known to break, with reasons.
        device: the device of the pools; see `Checker`.

    Raises:
        ConfigError: the component is not installed, or `Checker` refuses the arguments.
        Unusable: a component that cannot be loaded or built.
    """

    def __init__(
        self,
        name: str,
        options: object,
        profile: object,
        expected_failures: object,
        device: str = "cpu",
    ) -> None:
        expect_installed(name)
        self.name = name
        self._end: str | None = None
        self._process, self._answers = _start()
        # If it is not closed it still leaves nothing behind.
        self._stop = weakref.finalize(self, _stop, self._process, self._answers)
        given = {
            "options": options,
            "profile": profile,
            "expected_failures": expected_failures,
            "device": device,
        }
        try:
            hello = self._ask({"name": name, "given": packed(given)}, "when it was started")
            ready = None if hello is None else self._read()
        except BaseException:
            self.close()
            raise
        self.idents: tuple[str, ...] = tuple(hello["idents"]) if hello is not None else ()
        if ready is not None and "usable" in ready:
            return
        if ready is None or "replaced" in ready:
            loading = "before it was loaded and built"
            self._end = self._ended(loading) if ready is None else ready["replaced"]
        self.close()
        if self._end is not None:
            raise Unusable(self._told())
        assert ready is not None
        if "refused" in ready:
            raise ConfigError(ready["refused"])
        raise Unusable(Result.of_json(ready["unusable"]))

    def decide(self, ident: str) -> Result:
        """One clause."""
        if self._end is not None:
            return self._result(ident, ident.partition("-")[0], Status.UNDECIDED, self._end)
        answer = self._ask({"decide": ident}, f"while {ident} was decided")
        return self._told() if answer is None else Result.of_json(answer["result"])

    def verdict(self) -> list[Result]:
        """Results beside clauses: other rules found broken, and expectations."""
        if self._end is not None:
            return []
        answer = self._ask({"verdict": True}, "when it was asked for other broken rules")
        return [self._told()] if answer is None else list(map(Result.of_json, answer["results"]))

    def finding(self) -> Result | None:
        """The finding that leaves clauses undecided."""
        answer = None
        if self._end is None:
            answer = self._ask({"finding": True}, "when it was asked for broken rules")
        if answer is None:
            return self._told()
        return None if answer["finding"] is None else Result.of_json(answer["finding"])

    def told_by(self) -> str | None:
        """The clause that reports why others are undecided, if one is asked."""
        if self._end is not None:
            return None
        answer = self._ask({"told by": True}, "when it was asked for broken rules")
        ident: str | None = None if answer is None else answer["ident"]
        return ident

    def close(self) -> None:
        """End the process."""
        self._stop()

    # -- inside

    def _ask(self, question: dict[str, Any], when: str) -> Any:
        """The answer; None if the process ended instead, or its code is not the suite's."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._read()
        except OSError:
            answer = None
        if answer is None:
            self._end = self._ended(when)
        elif "replaced" in answer:
            self._end = answer["replaced"]
        return None if self._end is not None else answer

    def _read(self) -> Any:
        try:
            line = self._answers.readline()
        except BaseException:  # the caller was told to stop: nobody waits for the answer
            _kill(self._process)
            raise
        return json.loads(line) if line.endswith("\n") else None

    def _ended(self, when: str) -> str:
        try:
            status = self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            _kill(self._process)
            status = self._process.wait()
        return f"the suite's process ended with status {status} {when}"

    def _told(self) -> Result:
        """The end of the process, as the result of a clause."""
        assert self._end is not None
        clause = "nothing-is-replaced" if "replaced" in self._end else "the-process-goes-on"
        return self._result(f"{ENDED}-{clause}", ENDED, Status.FAILED, self._end)

    def _result(self, ident: str, rule: str, status: Status, evidence: str) -> Result:
        return Result(self.name, ident, rule, RULES[rule], status, evidence)


def _start() -> tuple[subprocess.Popen[str], IO[str]]:
    """The process and the stream its answers are read from."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvgraft_testing.served", str(write)],
        stdin=subprocess.PIPE,
        stdout=2,  # a component's prints are no answer
        text=True,
        pass_fds=[write],
        env={**os.environ, "PYTHONPATH": python_path()},
        start_new_session=True,  # its group: it and processes that a component starts
    )
    os.close(write)
    return process, os.fdopen(read, encoding="utf-8")


def _stop(process: subprocess.Popen[str], answers: IO[str]) -> None:
    """End a process that waits for questions, or does not any more."""
    answers.close()
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[str]) -> None:
    """End a process and those of its group at once; nothing if it is over."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
