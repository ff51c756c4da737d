"""Lines that say now and then that long work goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["LINE_EVERY_S", "lines_about"]

LINE_EVERY_S = 30.0
"""Seconds between two lines."""


@contextmanager
def lines_about(work: str, write: Callable[[str], object]) -> Iterator[None]:
    """Write a line every half a minute, from a thread of its own.

    The state machine takes most of the time without a result, so a clock triggers the lines.

    Args:
        work: begins each line.
        write: gets a line without its end.
    """
    began, ended = time.monotonic(), threading.Event()

    def tell() -> None:
        while not ended.wait(LINE_EVERY_S):
            write(f"kvgraft: {work}, {time.monotonic() - began:.0f} s so far")

    teller = threading.Thread(target=tell, name="kvgraft-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
