"""Counts the turns of loops, so that one that makes no progress fails its test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import kvgraft
import kvgraft_storage

__all__ = ["Turns", "counted"]

SOURCES = tuple(str(Path(each.__path__[0])) for each in (kvgraft, kvgraft_storage))


class Turns:
    """Turns of loops in this thread's calls of the cache: steps back to a line above, in one frame.

    Attributes:
        n: turns so far.
        limit: most of them; one more raises.
    """

    def __init__(self, limit: int) -> None:
        self.n = 0
        self.limit = limit

    def tracer(self, frame: FrameType, event: str, argument: Any) -> Any:
        """For `sys.settrace`."""
        del event, argument
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        line = frame.f_lineno

        def in_frame(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal line
            del argument
            if event == "line":
                if frame.f_lineno < line:
                    self.n += 1
                    if self.n > self.limit:
                        code = frame.f_code
                        raise AssertionError(
                            f"more than {self.limit} turns; the last one is in line "
                            f"{frame.f_lineno} of {code.co_name}, {code.co_filename}"
                        )
                line = frame.f_lineno
            return in_frame

        return in_frame


@contextmanager
def counted(limit: int) -> Iterator[Turns]:
    """Count the turns of loops, of which there may be `limit`; only of a core in plain Python."""
    turns, before = Turns(limit), sys.gettrace()
    sys.settrace(turns.tracer)
    try:
        yield turns
    finally:
        sys.settrace(before)
