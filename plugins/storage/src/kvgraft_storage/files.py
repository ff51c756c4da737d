"""Files that are written whole or not at all, and checks for regular files.

A file is written under a unique name, and locked meanwhile; only the lock says that a writer is
still at work. Process ids say nothing: they are small, repeat, and differ between containers.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = [
    "NotRegularFileError",
    "create_unfinished",
    "has_name",
    "open_regular",
    "remove_unfinished",
    "replace_file",
    "try_lock",
    "unfinished_file",
    "unfinished_path",
]

NOT_REGULAR = frozenset({errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV})
"""Errors of opening a link, a directory, a socket or a device."""


class NotRegularFileError(FileNotFoundError):
    """The name belongs to something else than a regular file."""


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of a regular file of exactly this name: no link is followed.

    Args:
        path: its name.
        flags: of `os.open`.
        mode: permissions of a new one, less those the process never gives.

    Raises:
        NotRegularFileError: a link, a directory, a pipe, a socket or a device has the name.
        OSError: it cannot be opened; FileNotFoundError if it is missing.
    """
    with suppress(FileNotFoundError):  # opening a device may do something
        _expect_regular(path, os.lstat(path).st_mode)
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, mode)
    except OSError as error:
        if error.errno in NOT_REGULAR:
            raise _not_regular(path) from error
        raise
    try:
        _expect_regular(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def try_lock(fd: int) -> bool:
    """Take the advisory lock of a whole file; false if another open file has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def has_name(fd: int, path: Path) -> bool:
    """Whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def unfinished_path(directory: Path, subject: str) -> Path:
    """A unique name, for a file that is not whole yet."""
    return directory / f".{subject}-{secrets.token_hex(16)}.tmp"


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace the file of this name, whole or not at all.

    A reader sees the old one or the new one, even after a crash of the machine. Links are followed;
    the new file takes the old one's permissions, and its owner where that is allowed. Unfinished
    files of other writers of the same file are removed.

    Args:
        path: where.
        content: all of it.
        mode: permissions where there was no file, less those the process never gives.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    file = Path(os.path.realpath(path))
    with unfinished_file(file, mode) as (fd, made):
        _take_after(file, fd)
        with open(fd, "wb", closefd=False) as whole:
            whole.write(content)
        os.fsync(fd)
        made.replace(file)


@contextmanager
def unfinished_file(file: Path, mode: int = 0o600) -> Iterator[tuple[int, Path]]:
    """A new file beside `file`, locked, and its name; gone at the end if it was not renamed.

    Raises:
        OSError: it cannot be made.
    """
    subject = file.name[:50]  # the added suffix must fit into a name, too
    with suppress(OSError):  # one may write into some directories that one may not read
        remove_unfinished(file.parent, subject)
    fd, made = create_unfinished(file.parent, subject, mode)
    try:
        yield fd, made
    finally:
        made.unlink(missing_ok=True)
        os.close(fd)


def _take_after(file: Path, fd: int) -> None:
    """Give a new file the owner, where that is allowed, and the permissions of the old one."""
    try:
        old = file.stat()
    except FileNotFoundError:
        return
    with suppress(PermissionError):
        os.fchown(fd, old.st_uid, old.st_gid)
    os.fchmod(fd, stat.S_IMODE(old.st_mode))


def create_unfinished(directory: Path, subject: str, mode: int = 0o600) -> tuple[int, Path]:
    """A new file, locked as long as its descriptor is open, and its name.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        path = unfinished_path(directory, subject)
        fd = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        if try_lock(fd) and has_name(fd, path):
            return fd, path
        os.close(fd)  # somebody took it for a file that nobody finishes


def remove_unfinished(directory: Path, subject: str, former: str = r"(?!)") -> None:
    """Remove unfinished files that nobody has locked.

    Files that cannot be opened, and special files, are kept.

    Args:
        directory: where.
        subject: whose.
        former: a regular expression of other names they may have.

    Raises:
        OSError: the directory cannot be read.
    """
    named = re.compile(rf"\.{re.escape(subject)}-[0-9a-f]{{32}}\.tmp|{former}")
    with os.scandir(directory) as entries:
        paths = [directory / each.name for each in entries if named.fullmatch(each.name)]
    for path in paths:
        with suppress(OSError):
            _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    fd = open_regular(path, os.O_RDWR)
    try:
        if try_lock(fd) and has_name(fd, path):
            path.unlink()
    finally:
        os.close(fd)


def _expect_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise _not_regular(path)


def _not_regular(path: Path) -> NotRegularFileError:
    return NotRegularFileError(errno.ENOENT, "is no regular file", str(path))
