"""Versions of namespaces in a store's directory: a small file each, which eviction leaves alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvgraft_file.open_files import OpenFiles
from kvgraft_storage.files import open_regular, replace_file

__all__ = ["VersionFiles"]

VERSION_NBYTES = 32
NAMED = re.compile(r"([0-9a-f]{64})\.version")


class VersionFiles:
    """Reads the versions of a directory when it is opened, and writes them whole or not at all.

    A damaged file counts as another version, and so does one that cannot be read: the data of its
    namespace is a miss then.

    Args:
        path: the directory.
        open_files: bounds the open files.

    Attributes:
        found: the versions when it was opened, and those set since, by name.
    """

    def __init__(self, path: Path, open_files: OpenFiles) -> None:
        self._path = path
        self._open_files = open_files
        names = open_files.opening(lambda: os.listdir(path))
        matches = [NAMED.fullmatch(name) for name in names]
        self.found = {
            bytes.fromhex(match[1]): self._read(path / match[0]) for match in matches if match
        }

    def set(self, name: bytes, version: bytes) -> None:
        """Write one, durable when the call returns.

        Raises:
            OSError: it cannot be written; the one before stays.
        """
        path = self._path / f"{name.hex()}.version"
        self._open_files.opening(lambda: replace_file(path, version))
        self.found[name] = version

    def _read(self, path: Path) -> bytes:
        try:
            fd = self._open_files.opening(lambda: open_regular(path, os.O_RDONLY))
        except OSError as error:
            return f"unread {error.errno}".encode()
        with os.fdopen(fd, "rb") as file:
            try:
                return file.read(VERSION_NBYTES + 1)
            except OSError as error:
                return f"unread {error.errno}".encode()
