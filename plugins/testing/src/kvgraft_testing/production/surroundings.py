"""Processes, and this process for a while, without a sign of the suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from kvgraft_testing.process import python_path

__all__ = ["environment", "hidden"]

SUITE = ("kvgraft_testing", "pytest", "hypothesis", "xdist", "execnet")
"""Parts of the names of modules that are loaded where tests run, and not in production."""

SIGNS = (
    *("PYTEST", "HYPOTHESIS", "COV_", "COVERAGE", "TOX", "NOX", "KVGRAFT_", "GITHUB_", "CI"),
    "PYTHONHASHSEED",  # without it a process has hashes of its own: sets of texts differ (D1)
)
"""Beginnings of the names of variables that are set where tests run."""


def environment(first: str) -> dict[str, str]:
    """Variables of a process that imports from a directory, then as this one, without signs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(SIGNS)}
    return {**kept, "PYTHONPATH": os.pathsep.join((first, python_path()))}


def _of_the_suite(module: str) -> bool:
    return any(part in module for part in SUITE)


@contextmanager
def hidden() -> Iterator[None]:
    """Hide the suite from code that looks at modules, arguments and the environment."""
    modules = {name: module for name, module in sys.modules.items() if _of_the_suite(name)}
    arguments, variables = sys.argv[:], dict(os.environ)
    for name in modules:
        del sys.modules[name]
    for name in variables:
        if name.startswith(SIGNS):
            del os.environ[name]
    sys.argv[:] = ["serve"]
    try:
        yield
    finally:
        for name in [name for name in sys.modules if _of_the_suite(name)]:
            del sys.modules[name]
        sys.modules.update(modules)
        os.environ.update({name: variables[name] for name in variables if name.startswith(SIGNS)})
        sys.argv[:] = arguments
