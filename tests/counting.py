"""The work of a call, counted rather than timed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["lines_run", "without_collections"]


@contextmanager
def without_collections() -> Iterator[None]:
    """No collection runs meanwhile: what it calls, of earlier tests' objects, would be counted."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def lines_run(call: Callable[[], object]) -> int:
    """Lines of Python that a call runs, each as often as it does; none of compiled modules."""
    lines = 0

    def count(_: FrameType, event: str, __: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    was = sys.gettrace()
    with without_collections():
        sys.settrace(count)
        try:
            call()
        finally:
            sys.settrace(was)
    return lines
