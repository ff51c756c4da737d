"""Writes results whole or not at all.

A reader of a file sees the whole old result or the whole new one: the new text goes to a temporary
file beside it, which takes its place once it is complete and on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvgraft.errors import ConfigError
from kvgraft_storage.files import replace_file, unfinished_file

__all__ = ["Target", "expect_distinct", "write_whole"]

STANDARD_OUTPUT = "-"

Name = str | os.PathLike[str]


class Target:
    """The destination of a result.

    Args:
        path: a file, a pipe or another device, or `-` for standard output; links are followed.

    Attributes:
        is_standard_output: whether this is standard output, under any name.

    Raises:
        ConfigError: it could not be written. The check changes nothing.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_standard_output = path == STANDARD_OUTPUT or _is_open_as_output(path)
        if not self.is_standard_output:
            with self._refusing():
                _expect_writable(path)

    def __str__(self) -> str:
        return "standard output" if self.is_standard_output else self.path

    def is_same(self, other: Target) -> bool:
        """Whether writing one overwrites the other."""
        if self.is_standard_output or other.is_standard_output:
            return self.is_standard_output and other.is_standard_output
        return _is_same_file(self.path, other.path)

    def write(self, text: str) -> None:
        """Write the result; a file keeps its content unless all of it could be written.

        Raises:
            ConfigError: it could not be written.
            BrokenPipeError: its reader has stopped reading.
        """
        with self._refusing():
            if self.is_standard_output:
                if sys.stdout is None:
                    raise OSError(errno.EBADF, "it is closed")
                sys.stdout.write(text)
                sys.stdout.flush()
            else:
                write_whole(self.path, text)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise ConfigError(f"{self}: {error.strerror}; choose another path") from error


def expect_distinct(targets: Sequence[tuple[str, Target]], inputs: Sequence[Name]) -> None:
    """Refuse two results in one file, and a result in an input file.

    Args:
        targets: the targets by option.
        inputs: the files that are read.

    Raises:
        ConfigError: naming both.
    """
    for position, (option, target) in enumerate(targets):
        for other_option, other in targets[:position]:
            if target.is_same(other):
                raise ConfigError(
                    f"{other_option} {other.path} and {option} {target.path} are the same file; "
                    "give each a path of its own"
                )
        for path in inputs:
            if not target.is_standard_output and _is_same_file(target.path, path):
                raise ConfigError(
                    f"{option} {target.path} is the trace that is replayed; choose another path"
                )


def write_whole(path: Name, text: str) -> None:
    """Write a file as UTF-8, whole or not at all.

    An old file is replaced in one step and keeps its owner and permissions; links are followed.
    A pipe or another device is written to directly.

    Raises:
        OSError: it cannot be written; the old file stays.
    """
    if _is_device(path):
        with open(path, "w", encoding="utf-8") as device:
            device.write(text)
        return
    replace_file(Path(path), text.encode(), mode=0o666)


def _expect_writable(path: str) -> None:
    """Raise the error that writing would raise, as far as can be known; changes nothing."""
    found = _stat(path)
    if os.path.basename(path) in ("", os.curdir, os.pardir):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not stat.S_ISREG(found.st_mode):
            return
    file = Path(os.path.realpath(path))
    with unfinished_file(file):
        pass
    directory = file.parent.stat()
    user = os.geteuid()
    if (
        found is not None
        and directory.st_mode & stat.S_ISVTX
        and user not in (0, found.st_uid, directory.st_uid)
    ):
        raise PermissionError(errno.EPERM, "only its owner can replace it in this directory")


def _stat(path: Name) -> os.stat_result | None:
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def _is_device(path: Name) -> bool:
    found = _stat(path)
    return found is not None and not stat.S_ISREG(found.st_mode)


def _is_same_file(one: Name, other: Name) -> bool:
    """Whether two names are or would be one file or pipe; devices may be shared."""
    found, there = _stat(one), _stat(other)
    if found is None or there is None:
        return os.path.realpath(one) == os.path.realpath(other)
    return os.path.samestat(found, there) and not stat.S_ISCHR(found.st_mode)


def _is_open_as_output(path: str) -> bool:
    """Whether standard output goes to this file already."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(1))
    except OSError:
        return False
