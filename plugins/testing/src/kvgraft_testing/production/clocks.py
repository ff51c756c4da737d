"""A later time for every reader of a clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

__all__ = ["clocks_moved"]


@contextmanager
def clocks_moved(seconds: float) -> Iterator[None]:
    """Make the module `time` give a later time."""
    with ExitStack() as stack:
        for name in ("time", "monotonic", "perf_counter"):
            for clock, unit in ((name, 1.0), (f"{name}_ns", 1e9)):
                stack.enter_context(patch.object(time, clock, _ahead(clock, seconds * unit)))
        yield


def _ahead(clock: str, by: float) -> Callable[[], float]:
    real = getattr(time, clock)
    return lambda: real() + type(real())(by)
