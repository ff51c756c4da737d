"""pytest options for contract tests: the profile, and a report of every clause as JSON.

Where a clause takes long, lines say so; the first of a class runs the state machine for all.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvgraft_testing.working import lines_about

__all__ = [
    "pytest_addoption",
    "pytest_configure",
    "pytest_pycollect_makeitem",
    "pytest_terminal_summary",
]

PROFILES = ("dev", "ci", "nightly")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--contract-report FILE`, `--contract-profile NAME`."""
    group = parser.getgroup("kvgraft", "kvgraft's contract suite")
    group.addoption(
        "--contract-report",
        metavar="FILE",
        type=Path,
        help="write the result of every clause as JSON",
    )
    group.addoption(
        "--contract-profile",
        default="ci",
        choices=PROFILES,
        help="how hard the state machine looks (default: ci)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", "contract(rule): a clause of kvgraft's contract")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(), "kvgraft-progress")


class Progress:
    """Says on standard error which contract tests take long, those of xdist's workers too."""

    def __init__(self) -> None:
        # pytest redirects the descriptor itself while a test runs
        self._stderr = os.fdopen(os.dup(2), "w", encoding="utf-8")
        self._running: dict[str, ExitStack] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        if "::test_clause[" in nodeid:
            running = self._running[nodeid] = ExitStack()
            running.enter_context(lines_about(f"running {nodeid}", self._write))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """A test ended."""
        self._running.pop(nodeid, ExitStack()).close()

    def pytest_unconfigure(self) -> None:
        """Testing ended, perhaps within a test."""
        for running in self._running.values():
            running.close()
        self._stderr.close()

    def _write(self, line: str) -> None:
        self._stderr.write(f"\n{line}\n")  # behind the dots of tests
        self._stderr.flush()


def pytest_pycollect_makeitem(collector: pytest.Collector, obj: object) -> None:
    """Refuse a contract class that has more than data, from whatever source."""
    module = sys.modules.get("kvgraft_testing.component_contract")
    if module is None or not isinstance(obj, type) or not issubclass(obj, module.ComponentContract):
        return
    if obj is module.ComponentContract:
        return
    try:
        module.expect_sealed(obj)
    except TypeError as error:
        raise collector.CollectError(str(error)) from None


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the report; clauses run in any process."""
    path: Path | None = config.getoption("contract_report")
    if path is None:
        return
    results = [
        value
        for outcome in ("passed", "failed", "skipped", "xfailed")
        for report in terminalreporter.getreports(outcome)
        if report.when == "call"
        for name, value in report.user_properties
        if name == "contract"
    ]
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    terminalreporter.write_line(f"{len(results)} contract results written to {path}")
