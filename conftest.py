"""Hypothesis profiles: dev while writing, ci before merging; nightly and fuzz look much longer.

Every run of dev is the same, and every run of ci: a run that passes once passes again. The others
look for new failures.
"""

from __future__ import annotations

import gc
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Read when torch is imported. Tests run in as many processes as there are cores, over small
tensors; more threads only wait for each other."""

# Tests start some hundred processes: bytecode is kept, so that each does not compile everything.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

COMMON = settings(
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

settings.register_profile("dev", COMMON, max_examples=5, stateful_step_count=40, derandomize=True)
settings.register_profile("ci", settings.get_profile("dev"), print_blob=True)
settings.register_profile(
    "nightly", COMMON, max_examples=500, stateful_step_count=60, print_blob=True
)
settings.register_profile(
    "fuzz", COMMON, max_examples=100, stateful_step_count=100, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rule ID`."""
    said = "run only tests that name a rule of the contract, in a marker, parameters or source"
    parser.addoption("--rule", metavar="ID", help=said)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Iterator[None]:
    """Skip tests of GPUs where there is none; those that patch the core where it is compiled."""
    from kvgraft.compiled import is_compiled
    from kvgraft_testing.machine.constants import constants_of_modules_left_out

    _leave_most_to_long(items)
    # Hypothesis would read the source of every module, seconds, for constants no example has
    with constants_of_modules_left_out():
        yield
    _keep_those_of(config.getoption("--rule"), config, items)
    for item in items:
        reason = _no_accelerator_for(item)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
    if is_compiled():
        for item in items:
            if item.get_closest_marker("plain_build"):
                item.add_marker(pytest.mark.skip(reason="needs the plain build: patches the core"))


def pytest_collection_finish() -> None:
    """The garbage collector leaves alone what was imported and collected: it is there to the end.

    Else every full collection visits half a million objects.
    """
    gc.collect()
    gc.freeze()


def _leave_most_to_long(items: list[pytest.Item]) -> None:
    """Of a test's parameters, all but each n-th are long where it is marked `one_in(n)`."""
    n_seen: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is None:
            continue
        test = item.nodeid.partition("[")[0]
        if n_seen[test] % mark.args[0]:
            item.add_marker(pytest.mark.long)
        n_seen[test] += 1


def _keep_those_of(rule: str | None, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that do not name a rule."""
    if rule is None:
        return
    from kvgraft_testing.rules import RULES

    if rule not in RULES:
        raise pytest.UsageError(f"--rule {rule}: no rule of docs/contract.md; they are like T9")
    named = re.compile(rf"(?<![A-Za-z0-9]){rule}(?![A-Za-z0-9])")
    others = [each for each in items if not named.search(_about(each))]
    config.hook.pytest_deselected(items=others)
    gone = {id(each) for each in others}
    items[:] = [each for each in items if id(each) not in gone]


def _about(item: pytest.Item) -> str:
    """A test's id, its markers, what it is given, and its source."""
    about = [item.nodeid, *[str(mark.args) for mark in item.iter_markers("rule")]]
    given = getattr(item, "callspec", None)
    with suppress(ValueError, RecursionError):  # a number or a tuple that is too long to be shown
        about.append(str(given and given.params))
    with suppress(OSError, TypeError):
        about.append(inspect.getsource(getattr(item, "obj", None)))  # type: ignore[arg-type]
    return " ".join(about)


def _no_accelerator_for(item: pytest.Item) -> str | None:
    """Why a test cannot run on what torch finds here: no other place decides it."""
    on_gpu, without = (item.get_closest_marker(name) for name in ("gpu", "no_gpu"))
    if on_gpu is None and without is None:
        return None
    from tests.gpu import why_not

    if on_gpu is not None:
        return why_not(*on_gpu.args, **on_gpu.kwargs)
    return None if why_not() else "torch finds an accelerator here"


@pytest.fixture(scope="session", autouse=True)
def examples_do_not_depend_on_imports() -> Iterator[None]:
    """A test draws the same examples alone as among all others."""
    from kvgraft_testing.machine.constants import constants_of_modules_left_out

    with constants_of_modules_left_out():
        yield


@pytest.fixture(scope="session")
def fuzz_steps() -> int:
    """Steps the state machines take together under the fuzz profile; 0 under the others.

    The profile's examples are repeated until the number in KVGRAFT_FUZZ_STEPS is reached.
    """
    if settings.get_current_profile_name() != "fuzz":
        return 0
    return int(os.environ.get("KVGRAFT_FUZZ_STEPS", "1000000"))


class _AtOnce:
    """Prints a failure when it is found: a run of the fuzz profile takes an hour."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(f"{report.nodeid}\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    """Register what only some profiles need."""
    if config.getoption("--hypothesis-profile", None) == "fuzz":
        config.pluginmanager.register(_AtOnce(config))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the state machines did, over all processes."""
    counts: Counter[str] = Counter()
    seconds = 0.0
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        if report.when != "call":
            continue
        machine = dict(report.user_properties).get("machine")
        if isinstance(machine, dict):
            counts.update(machine)
            seconds += report.duration
    if not counts:
        return
    terminalreporter.section("state machines")
    steps = counts.pop("steps")
    examples = counts.pop("examples")
    terminalreporter.write_line(
        f"{steps:,} steps in {examples:,} examples, {steps / max(seconds, 1e-9):,.0f} steps/s "
        "per process; calls and outcomes:"
    )
    for name, count in counts.most_common():
        terminalreporter.write_line(f"  {count:>10,}  {name}")
