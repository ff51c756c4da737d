"""The directory of a store's segments, shared by all processes that open it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from kvgraft import ConfigError
from kvgraft_file.disk import SUBJECT, DiskFile, supports_direct
from kvgraft_file.open_files import OpenFiles
from kvgraft_file.segment import SUFFIX, segment_path
from kvgraft_file.shared_hints import SharedHints
from kvgraft_storage.files import (
    NotRegularFileError,
    has_name,
    open_regular,
    remove_unfinished,
    try_lock,
)

__all__ = ["LOCK", "Directory", "Listed", "holds_store"]

LOCK = "kvgraft.lock"
NAMED = re.compile(rf"[0-7][0-9a-f]{{15}}{re.escape(SUFFIX)}")
LAST_NUMBER = (1 << 63) - 1
FORMER = r"\.(?:[0-9a-f]{16}|probe)-\d+[-0-9]*\.tmp"
"""Names of unfinished files of former versions."""

NUMBERS_TRIED = 64
"""Segment numbers that are tried for one with a layout slot of its own."""

PAUSE_S = 0.002
"""Seconds between two tries for the lock."""


class Listed(NamedTuple):
    """A file with a segment's name.

    Attributes:
        number: the number in its name.
        nbytes: length of the file.
        inode: inode of the file.
    """

    number: int
    nbytes: int
    inode: int


def holds_store(path: Path) -> bool:
    """Whether a directory has the lock or a segment of a store."""
    return path.is_dir() and any(
        name == LOCK or NAMED.fullmatch(name) is not None for name in os.listdir(path)
    )


class Directory:
    """Names, sizes and the lock of a store's directory; it ignores other files.

    Args:
        path: an existing directory that can be written to.
        max_open_files: how many segments stay open; None for as many as the process's limit allows.

    Attributes:
        direct: whether files here can be written past the page cache.
        open_files: bounds the open segments.

    Raises:
        ConfigError: there is no such directory, it cannot be written to, something else has the
            lock's name, or the process has too few file descriptors left.
    """

    def __init__(self, path: Path, max_open_files: int | None = None) -> None:
        self.path = path
        self._thread = threading.Lock()
        if not path.is_dir():
            fault = "does not exist; create the directory first"
            if path.exists():
                fault = "is no directory; name one"
            raise ConfigError(f"storage 'file': {path} {fault}")
        self.open_files = OpenFiles(max_open_files, f"storage 'file': {path}")
        try:
            self.direct = supports_direct(path)
            self._lock = self._open_lock()
        except NotRegularFileError as error:
            raise ConfigError(
                f"storage 'file': {path / LOCK} is no regular file; remove it, or name another "
                "directory"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"storage 'file': {path} cannot be written to: {error.strerror}; "
                "give this user write access or name another directory"
            ) from error
        with suppress(OSError), self.locked(0.0):
            self.remove_unfinished()

    def _open_lock(self) -> int:
        return open_regular(self.path / LOCK, os.O_RDWR | os.O_CREAT)

    def open(self, path: Path, flags: int = 0) -> DiskFile:
        """A file of the directory.

        Raises:
            FileNotFoundError: it is gone, or it is no regular file.
            OSError: it cannot be opened.
        """
        return DiskFile(path, direct=self.direct, flags=flags, open_files=self.open_files)

    def segments(self) -> list[Listed]:
        """Every regular file with a segment's name, oldest first."""
        found = []
        with self.open_files.opening(lambda: os.scandir(self.path)) as entries:
            for entry in entries:
                if NAMED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    try:
                        nbytes = entry.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue
                    number = int(entry.name.removesuffix(SUFFIX), 16)
                    found.append(Listed(number, nbytes, entry.inode()))
        return sorted(found)

    def segment_path(self, number: int) -> Path:
        """The path of a segment."""
        return segment_path(self.path, number)

    def free_number(self) -> int:
        """A number larger than any that was used: about the time, unless the clock is behind.

        A process that knows a removed segment must not take another one for it. The number's layout
        slot is shared with no other segment, if one is free: a place made in one segment would keep
        others with its slot from being overwritten.
        """
        names = self.open_files.opening(lambda: os.listdir(self.path))
        taken = {int(name[:16], 16) for name in names if NAMED.fullmatch(name)}
        now = time.time_ns()
        number = max(now, max(taken, default=0) + 1)
        if number > LAST_NUMBER:  # a file has the largest possible number
            number = now
            while number in taken:
                number += 1
            return number
        layouts = {SharedHints.layout_slot(each) for each in taken}
        tried = range(number, min(number + NUMBERS_TRIED, LAST_NUMBER + 1))
        return next(
            (each for each in tried if SharedHints.layout_slot(each) not in layouts), number
        )

    def remove_unfinished(self) -> None:
        """Remove files that no process will finish; holds the lock.

        Segments are created under the lock, so the writer of an unfinished one has ended. Files
        with a lock of their own are kept.
        """
        self.open_files.opening(lambda: remove_unfinished(self.path, SUBJECT, FORMER))

    @contextmanager
    def locked(self, deadline_s: float) -> Iterator[None]:
        """Hold the lock: others add, reuse and remove no segments, and mark no records removed.

        Raises:
            TimeoutError: another process kept the lock for `deadline_s`.
        """
        end = time.monotonic() + deadline_s
        if not self._thread.acquire(timeout=max(0.0, deadline_s)):
            raise self._timeout(deadline_s)
        try:
            while not self._try_lock():
                if time.monotonic() > end:
                    raise self._timeout(deadline_s)
                time.sleep(PAUSE_S)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            self._thread.release()

    def _try_lock(self) -> bool:
        if self._lock < 0:
            raise OSError(errno.EBADF, "was closed", str(self.path))
        if not try_lock(self._lock):
            return False
        if has_name(self._lock, self.path / LOCK):
            return True
        fd = self._open_lock()  # the lock file was removed, and others lock a new one
        os.close(self._lock)
        self._lock = fd
        return False

    def _timeout(self, deadline_s: float) -> TimeoutError:
        said = f"lock not free after {deadline_s:.1f} s"
        return TimeoutError(errno.ETIMEDOUT, said, str(self.path))

    def sync(self) -> None:
        """`fsync` the directory, so that the names of segments are durable."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        fd = self.open_files.opening(lambda: os.open(self.path, flags))
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the lock file, which stays; a thread that waits for the lock finds it closed."""
        with self._thread:
            os.close(self._lock)
            self._lock = -1
