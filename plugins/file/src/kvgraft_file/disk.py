"""A file read and written in whole blocks, past the page cache where the file system allows."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvgraft_file.open_files import OpenFiles
from kvgraft_storage import BLOCK_NBYTES, aligned
from kvgraft_storage.files import open_regular, unfinished_path

__all__ = ["DISK_ERRORS", "NO_ROOM", "SUBJECT", "DiskFile", "TruncatedRead", "supports_direct"]

SUBJECT = "kvgraft"
"""Owner of unfinished files, as their names have it."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean there is no room."""

DISK_ERRORS = frozenset({errno.EIO, errno.ENODATA, errno.EUCLEAN})
"""Errors of a place on the disk, not of all of it."""

MAX_PIECES = 1000
"""Pieces of memory in one call; Linux takes 1024."""

SECTOR_NBYTES = 512
"""The unit in which `stat` counts blocks."""

LOCK_S = 1.0
PAUSE_S = 0.001

_FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock`: kind, whence, first byte, bytes, process."""


class TruncatedRead(Exception):  # noqa: N818 - an outcome
    """The file ends before the range to read."""


class DiskFile:
    """A regular file; closed when it is released and no thread uses it.

    With `open_files` it may be closed while nobody uses it, and is opened again when somebody does.
    From the first use on, everything that needs the descriptor happens between `acquire` and
    `release`, or in a `with`.

    Args:
        path: where; no link is followed.
        flags: of `os.open`, besides the access mode.
        direct: whether to go past the page cache.
        open_files: how many stay open.

    Attributes:
        fd: the descriptor; -1 while it is closed.
        is_same: a check of a reopened file, besides the file system's identity.

    Raises:
        NotRegularFileError: something else has the name.
        OSError: it cannot be opened.
    """

    def __init__(
        self, path: Path, *, direct: bool, flags: int = 0, open_files: OpenFiles | None = None
    ) -> None:
        self.path = path
        self._mode = os.O_RDWR | (os.O_DIRECT if direct else 0)
        self._open_files = open_files
        self.fd = self._open(flags)
        told = os.fstat(self.fd)
        self._identity = (told.st_dev, told.st_ino)
        self.is_same: Callable[[], bool] = lambda: True
        self._users = 0
        self._is_kept = True
        self._lock = threading.Lock()

    def _open(self, flags: int) -> int:
        def action() -> int:
            return open_regular(self.path, self._mode | flags)

        return action() if self._open_files is None else self._open_files.opening(action)

    def acquire(self) -> None:
        """Keep it open until it is released; open it if it is closed.

        Raises:
            FileNotFoundError: it is gone, or was released.
            OSError: it cannot be opened.
        """
        with self._lock:
            if self.fd < 0:
                self._reopen()
            self._users += 1

    def _reopen(self) -> None:
        if self._is_kept:
            self.fd = self._open(0)
            same = False
            try:
                told = os.fstat(self.fd)
                same = (told.st_dev, told.st_ino) == self._identity and self.is_same()
            finally:
                if not same:
                    self._close()
            if same:
                return
        raise FileNotFoundError(errno.ENOENT, "is another file now", str(self.path))

    def release(self) -> None:
        """Use it no longer."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if not self._is_kept:
                self._close()
                return
        if self._open_files is not None:
            self._open_files.used(self)

    def __enter__(self) -> DiskFile:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def close_if_idle(self) -> None:
        """Close it, unless it is in use; it is opened again when it is used."""
        if self._lock.acquire(blocking=False):  # else somebody begins or ends using it
            try:
                if not self._users:
                    self._close()
            finally:
                self._lock.release()

    def let_go(self) -> None:
        """Close it for good, now or when its last user is done."""
        with self._lock:
            self._is_kept = False
            if not self._users:
                self._close()
        if self._open_files is not None:
            self._open_files.forget(self)

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def read(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Fill all pieces, from an offset on.

        Raises:
            TruncatedRead: the file is shorter.
            OSError: the disk failed.
        """
        for start in range(0, len(pieces), MAX_PIECES):
            some = pieces[start : start + MAX_PIECES]
            wanted = sum(map(len, some))
            if os.preadv(self.fd, some, offset) != wanted:
                raise TruncatedRead(f"{self.path}: ends before byte {offset + wanted}")
            offset += wanted

    def write(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Write all pieces, from an offset on.

        Raises:
            OSError: no room, or the disk failed.
        """
        for start in range(0, len(pieces), MAX_PIECES):
            some = pieces[start : start + MAX_PIECES]
            wanted = sum(map(len, some))
            if os.pwritev(self.fd, some, offset) != wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            offset += wanted

    def block(self, offset: int) -> memoryview:
        """One block.

        Raises:
            TruncatedRead: the file ends before it.
            OSError: the disk failed.
        """
        block = aligned(BLOCK_NBYTES)
        self.read([block], offset)
        return block

    def write_block(self, content: bytes, offset: int) -> None:
        """Write one block."""
        block = aligned(BLOCK_NBYTES)
        block[:] = content
        self.write([block], offset)

    def try_lock(self) -> bool:
        """Take the advisory lock that says somebody writes here; false if another has it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lock(self) -> None:
        """Take the advisory lock, which others have for moments only.

        Raises:
            TimeoutError: not these.
        """
        self._wait_for(self.try_lock)

    def unlock(self) -> None:
        """Give the advisory lock back, and all marks."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, 0, 0))
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    @contextmanager
    def locked(self, offset: int, nbytes: int) -> Iterator[None]:
        """Say to other open files of the same path that these bytes are being written.

        Raises:
            TimeoutError: another open file keeps some of them locked.
            OSError: it cannot be opened.
        """
        with self:
            self.mark(offset, nbytes)
            try:
                yield
            finally:
                self.unmark(offset, nbytes)

    def mark(self, offset: int, nbytes: int) -> None:
        """Lock some bytes as long as the file is open; it binds nobody, others ask for it.

        Who knew the file before it was reused may lock some of them for moments.

        Raises:
            TimeoutError: for longer than that.
        """
        self._wait_for(lambda: self._mark(offset, nbytes))

    def try_mark(self, offset: int, nbytes: int) -> bool:
        """Lock some bytes as `mark` does, without waiting.

        Returns:
            False if another open file has one of them locked, and if the file is gone: its blocks
            may be another writer's. Who reuses them takes the name first and then looks for locks,
            so the name is looked at after the bytes are locked. It is looked at before that, too,
            so that the other writer seldom has to wait.
        """
        if self.is_gone or not self._mark(offset, nbytes):
            return False
        gone = True
        try:
            gone = self.is_gone
        finally:
            if gone:
                self.unmark(offset, nbytes)
        return not gone

    def _mark(self, offset: int, nbytes: int) -> bool:
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, offset, nbytes))
        except (BlockingIOError, PermissionError):
            return False
        return True

    def _wait_for(self, attempt: Callable[[], bool]) -> None:
        end = time.monotonic() + LOCK_S
        while not attempt():
            if time.monotonic() > end:
                raise TimeoutError(
                    errno.ETIMEDOUT, "another process keeps it locked", str(self.path)
                )
            time.sleep(PAUSE_S)

    def unmark(self, offset: int, nbytes: int) -> None:
        """Undo `mark`."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, offset, nbytes))

    def is_locked(self, offset: int, nbytes: int) -> bool:
        """Whether another open file has any of these bytes locked."""
        told = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, offset, nbytes))
        return bool(_FLOCK.unpack(told)[0] != fcntl.F_UNLCK)

    @property
    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self.fd).st_size

    @property
    def allocated(self) -> int:
        """Bytes it has on the disk now; less than its size where it has holes."""
        return os.fstat(self.fd).st_blocks * SECTOR_NBYTES

    @property
    def inode(self) -> int:
        """Its number in the file system."""
        return self._identity[1]

    @property
    def is_gone(self) -> bool:
        """Whether its name is not its own any more: somebody reclaimed, reused or cleared it.

        If it is still there after a read, nothing had been written over the data read.
        """
        try:
            told = os.lstat(self.path)
        except FileNotFoundError:
            return True
        return (told.st_dev, told.st_ino) != self._identity

    def data_from(self, offset: int) -> int | None:
        """Where the next block begins that is more than a hole; None if there is none.

        A file that was only made longer has nothing to read, however long it is.
        """
        try:
            found = os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else offset
        return max(offset, found // BLOCK_NBYTES * BLOCK_NBYTES)


def _range(kind: int, offset: int, nbytes: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, nbytes, 0)


def supports_direct(directory: Path) -> bool:
    """Whether files of a directory can be written past the page cache, found by doing it.

    Raises:
        OSError: the directory cannot be written to at all.
    """
    path = unfinished_path(directory, SUBJECT)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with suppress(FileNotFoundError):  # another process may have removed it
            path.unlink()
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        block = aligned(BLOCK_NBYTES)
        os.pwritev(fd, [block], 0)
        os.preadv(fd, [block], 0)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return False
        if error.errno in NO_ROOM:
            return True
        raise
    finally:
        os.close(fd)
    return True
