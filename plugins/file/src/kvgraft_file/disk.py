"""A file that is read and written in whole blocks, with direct I/O if the file system allows it."""

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
"""The owner in names of unfinished files."""

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors of a full disk or quota."""

DISK_ERRORS = frozenset({errno.EIO, errno.ENODATA, errno.EUCLEAN})
"""Errors of a place on the disk, instead of the whole disk."""

MAX_PIECES = 1000
"""Pieces of memory per call; Linux takes at most 1024."""

SECTOR_NBYTES = 512
"""The unit in which `stat` counts blocks."""

LOCK_S = 1.0
PAUSE_S = 0.001

_FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock`: kind, whence, first byte, bytes, process."""


class TruncatedRead(Exception):  # noqa: N818 - an outcome
    """The file ends before the range to read."""


class DiskFile:
    """A regular file; it is closed once it is dropped and no thread uses it.

    With `open_files` it may be closed while unused, and is opened again at its next use. Every use
    of the descriptor is between `acquire` and `release`, or in a `with`.

    Args:
        path: its path; links are not followed.
        flags: flags of `os.open`, besides the access mode.
        direct: whether to use direct I/O.
        open_files: bounds the open files.

    Attributes:
        fd: the descriptor; -1 while it is closed.
        is_same: checks a reopened file, besides its inode.

    Raises:
        NotRegularFileError: the name is not a regular file's.
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
        """End a use."""
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
        """Close it unless it is in use; the next use opens it again."""
        if self._lock.acquire(blocking=False):  # else a thread begins or ends a use
            try:
                if not self._users:
                    self._close()
            finally:
                self._lock.release()

    def let_go(self) -> None:
        """Close it for good, now or when its last use ends."""
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
        """Read into all pieces, from an offset on.

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
        """Take the advisory lock of a writer; false if another process has it."""
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lock(self) -> None:
        """Take the advisory lock, which others hold only briefly.

        Raises:
            TimeoutError: another process held it longer.
        """
        self._wait_for(self.try_lock)

    def unlock(self) -> None:
        """Give the advisory lock back, and all marks."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, 0, 0))
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    @contextmanager
    def locked(self, offset: int, nbytes: int) -> Iterator[None]:
        """Lock bytes against other open files of the path while they are written.

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
        """Lock some bytes as long as the file is open; the lock is advisory.

        A process that knew the file before it was reused may lock some of them briefly.

        Raises:
            TimeoutError: for longer than that.
        """
        self._wait_for(lambda: self._mark(offset, nbytes))

    def try_mark(self, offset: int, nbytes: int) -> bool:
        """Lock some bytes as `mark` does, without waiting.

        Returns:
            False if another open file has one of them locked, or if the file is gone: its blocks
            may belong to another writer. A process that reuses the blocks renames the file first
            and then checks the locks, so this checks the name after it has locked. It also checks
            before, so that the other writer seldom has to wait.
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
        """The file's current length."""
        return os.fstat(self.fd).st_size

    @property
    def allocated(self) -> int:
        """Allocated bytes on the disk; less than its size if it has holes."""
        return os.fstat(self.fd).st_blocks * SECTOR_NBYTES

    @property
    def inode(self) -> int:
        """Its inode."""
        return self._identity[1]

    @property
    def is_gone(self) -> bool:
        """Whether its name no longer refers to it: it was reclaimed, reused or cleared.

        If it is still there after a read, the data read was not overwritten.
        """
        try:
            told = os.lstat(self.path)
        except FileNotFoundError:
            return True
        return (told.st_dev, told.st_ino) != self._identity

    def data_from(self, offset: int) -> int | None:
        """Offset of the next block with data; None if only a hole follows.

        A file that was only extended has no data, however long it is.
        """
        try:
            found = os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else offset
        return max(offset, found // BLOCK_NBYTES * BLOCK_NBYTES)


def _range(kind: int, offset: int, nbytes: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, nbytes, 0)


def supports_direct(directory: Path) -> bool:
    """Whether files of a directory support direct I/O; tries it.

    Raises:
        OSError: the directory cannot be written to.
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
