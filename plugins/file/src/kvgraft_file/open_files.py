"""Bounds the open files of a store, because the process needs descriptors for other things.

Only locked files must stay open: segments that this process writes, reclaims, or scans after their
writer ended. Every other segment is opened again when it is read.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol, TypeVar

from kvgraft import ConfigError

__all__ = ["FEWEST", "OpenFiles"]

FEWEST = 8
"""Fewest files that stay open."""

MOST = 256
"""Files that stay open by default, if the process's limit allows it."""

SHARE = 8
"""By default 1 / n of the limit is used."""

WORKING = 24
"""Other descriptors: locks, and segments that are written, read or reclaimed."""

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})
_Result = TypeVar("_Result")


class Idle(Protocol):
    """A file that can be closed while it is unused, and opened again."""

    def close_if_idle(self) -> None:
        """Close it unless it is in use."""


class OpenFiles:
    """The files that stay open, least recently used first.

    Args:
        most: largest number; None for as many as the process's limit (`ulimit -n`) allows.
        subject: names the owner in the message.

    Attributes:
        most: how many stay open, besides those in use.

    Raises:
        ConfigError: the limit leaves too few.
    """

    def __init__(self, most: int | None, subject: str) -> None:
        self.most = _allowance(most, subject)
        self._lock = threading.Lock()
        self._files: OrderedDict[Idle, None] = OrderedDict()

    def used(self, file: Idle) -> None:
        """Note a use of a file; closes the least recently used ones beyond the limit."""
        surplus = []
        with self._lock:
            self._files[file] = None
            self._files.move_to_end(file)
            while len(self._files) > self.most:
                surplus.append(self._files.popitem(last=False)[0])
        for each in surplus:
            each.close_if_idle()

    def forget(self, file: Idle) -> None:
        """Forget a file that was closed for good."""
        with self._lock:
            self._files.pop(file, None)

    def opening(self, action: Callable[[], _Result]) -> _Result:
        """Run an action that opens a file; without a free descriptor, close others first.

        Raises:
            OSError: it cannot be opened.
        """
        try:
            return action()
        except OSError as error:
            if error.errno not in EXHAUSTED:
                raise
        with self._lock:
            surplus, self._files = list(self._files), OrderedDict()
        for each in surplus:
            each.close_if_idle()
        return action()


def _allowance(most: int | None, subject: str) -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most or MOST
    left = limit - _n_open()
    wanted = most
    if wanted is None:
        wanted = max(FEWEST, min(MOST, limit // SHARE, left - WORKING))
    if wanted + WORKING > left:
        raise ConfigError(
            f"{subject}: max_open_files {wanted} + {WORKING} at work > {left} file descriptors "
            f"left of {limit}; raise the limit (ulimit -n) or close files"
        )
    return wanted


def _n_open() -> int:
    """Open descriptors of this process; 0 if unknown."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # one is that of the listing
    except OSError:
        return 0
