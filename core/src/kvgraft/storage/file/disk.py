"""A file read and written in whole blocks, past the page cache where the file system allows."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvgraft.storage.memory import BLOCK_NBYTES, aligned

__all__ = ["DISK_ERRORS", "NO_ROOM", "DiskFile", "TruncatedRead", "supports_direct"]

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""Errors that mean there is no room."""

DISK_ERRORS = frozenset({errno.EIO, errno.ENODATA, errno.EUCLEAN})
"""Errors of a place on the disk, not of all of it."""

MAX_PIECES = 1000
"""Pieces of memory in one call; Linux takes 1024."""


LOCK_S = 1.0
PAUSE_S = 0.001

_FLOCK = struct.Struct("@hhqqi4x")
"""`struct flock`: kind, whence, first byte, bytes, process."""


class TruncatedRead(Exception):  # noqa: N818 - an outcome
    """The file ends before what was to be read."""


class DiskFile:
    """An open file that closes when it is let go of and nobody reads it any more.

    Args:
        path: where.
        flags: of `os.open`, besides the access mode.
        direct: whether to go past the page cache.
    """

    def __init__(self, path: Path, *, direct: bool, flags: int = 0) -> None:
        self.path = path
        flags |= os.O_RDWR | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self.fd = os.open(path, flags, 0o600)
        self._inode = os.fstat(self.fd).st_ino
        self._users = 1
        self._lock = threading.Lock()

    def __enter__(self) -> DiskFile:
        with self._lock:
            assert self._users
            self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                os.close(self.fd)

    def let_go(self) -> None:
        """Close it, now or when its last reader is done; once."""
        self.__exit__()

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
        end = time.monotonic() + LOCK_S
        while not self.try_lock():
            if time.monotonic() > end:
                raise TimeoutError(errno.ETIMEDOUT, "somebody keeps it locked", str(self.path))
            time.sleep(PAUSE_S)

    def unlock(self) -> None:
        """Give the advisory lock back, and all marks."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, 0, 0))
        fcntl.flock(self.fd, fcntl.LOCK_UN)

    @contextmanager
    def locked(self, offset: int, nbytes: int) -> Iterator[None]:
        """Say to other open files of the same path that these bytes are being written."""
        with self:
            self.mark(offset, nbytes)
            try:
                yield
            finally:
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, offset, nbytes))

    def mark(self, offset: int, nbytes: int) -> None:
        """Lock some bytes as long as the file is open; it binds nobody, others ask for it."""
        fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, offset, nbytes))

    def is_locked(self, offset: int, nbytes: int) -> bool:
        """Whether another open file has any of these bytes locked."""
        told = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, offset, nbytes))
        return bool(_FLOCK.unpack(told)[0] != fcntl.F_UNLCK)

    @property
    def size(self) -> int:
        """Bytes in the file now."""
        return os.fstat(self.fd).st_size

    @property
    def is_gone(self) -> bool:
        """Whether its name is not its own any more: somebody reclaimed, reused or cleared it.

        If it is still there after a read, nothing had been written over what was read.
        """
        try:
            return self.path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True


def _range(kind: int, offset: int, nbytes: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, nbytes, 0)


def supports_direct(directory: Path) -> bool:
    """Whether files of a directory can be written past the page cache, found by doing it.

    Raises:
        OSError: the directory cannot be written to at all.
    """
    path = directory / f".probe-{os.getpid()}-{threading.get_native_id()}.tmp"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    os.close(os.open(path, flags, 0o600))
    try:
        file = DiskFile(path, direct=True)
        try:
            file.write_block(bytes(BLOCK_NBYTES), 0)
            file.block(0)
        finally:
            file.let_go()
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP):
            return False
        if error.errno in NO_ROOM:
            return True
        raise
    finally:
        path.unlink()
    return True
