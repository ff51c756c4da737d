"""The directory that holds the segments of one store, shared by every process that opens it."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgraft.errors import ConfigError
from kvgraft.storage.file.disk import supports_direct
from kvgraft.storage.file.segment import SUFFIX

__all__ = ["Directory"]

LOCK = "kvgraft.lock"
NAMED = re.compile(rf"[0-7][0-9a-f]{{15}}{re.escape(SUFFIX)}")
UNFINISHED = re.compile(r"\.(?:[0-9a-f]{16}|probe)-(\d+)[-0-9]*\.tmp")
PAUSE_S = 0.002
"""Between two tries for the lock."""


class Directory:
    """Names, sizes and the lock of a store's directory; files of others are left alone.

    Args:
        path: an existing directory that can be written to.

    Attributes:
        direct: whether files here can be written past the page cache.

    Raises:
        ConfigError: there is no such directory, or it cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread = threading.Lock()
        if not path.is_dir():
            fault = "does not exist; create the directory first"
            if path.exists():
                fault = "is no directory; name one"
            raise ConfigError(f"storage 'file': {path} {fault}")
        try:
            self.direct = supports_direct(path)
            self._lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"storage 'file': {path} cannot be written to: {error.strerror}; "
                "give this user write access or name another directory"
            ) from error

    def segments(self) -> list[tuple[int, Path, int]]:
        """Number, path and bytes of every file that is named as a segment, oldest first."""
        found = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                if NAMED.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                    try:
                        nbytes = entry.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue
                    number = int(entry.name.removesuffix(SUFFIX), 16)
                    found.append((number, self.path / entry.name, nbytes))
        return sorted(found)

    def free_number(self) -> int:
        """The next number whose name nothing has, be it a segment or not."""
        taken = [int(name[:16], 16) for name in os.listdir(self.path) if NAMED.fullmatch(name)]
        return max(taken, default=0) + 1

    def remove_unfinished(self) -> None:
        """Remove what writers that died left unfinished; under the lock."""
        for entry in list(self.path.iterdir()):
            named = UNFINISHED.fullmatch(entry.name)
            if named and not Path(f"/proc/{named[1]}").exists():
                entry.unlink(missing_ok=True)

    @contextmanager
    def locked(self, deadline_s: float) -> Iterator[None]:
        """Nobody else adds, reuses or removes segments meanwhile, nor marks records removed.

        Raises:
            TimeoutError: somebody else has had the lock for `deadline_s`.
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
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _timeout(self, deadline_s: float) -> TimeoutError:
        said = f"lock not free after {deadline_s:.1f} s"
        return TimeoutError(errno.ETIMEDOUT, said, str(self.path))

    def sync(self) -> None:
        """Make the names of segments durable."""
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the lock file, which stays; who waits for the lock finds it closed."""
        with self._thread:
            os.close(self._lock)
            self._lock = -1
