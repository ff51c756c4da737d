"""Ctrl-C, where it must wait."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uninterrupted"]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C counts at the block's end: it aborts the process while torch is being imported.

    On the main thread.

    Raises:
        KeyboardInterrupt: it was pressed meanwhile.
    """
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt
