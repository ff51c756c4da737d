"""A process that opens one store again and again; run by `test_leftovers`.

python -m plugins.file.tests.opening DIRECTORY OPENS FIRST

It says `ready`, waits for a line, and then opens, stores, fetches and closes so many times, keys
from FIRST on. With OPENS 0 it dies while it makes its first segment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvgraft_file import FileBackend
from kvgraft_storage import Status, Value

from .store import open_store

__all__ = ["DIED", "open_shared", "pair"]

SIZE = 9000
DIED = 7


def open_shared(directory: Path) -> FileBackend:
    return open_store(directory, 8 << 20, 1 << 16)


def pair(number: int) -> tuple[bytes, Value]:
    """A key and its value."""
    key = number.to_bytes(32, "big")
    return key, Value(memoryview(key * 8), memoryview(key * (SIZE // 32 + 1))[:SIZE])


def main(directory: Path, opens: int, first: int) -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    if not opens:
        os.posix_fallocate = lambda *_: os._exit(DIED)
    for number in range(first, first + max(opens, 1)):
        store = open_shared(directory)
        key, value = pair(number)
        assert [*store.set_from([key], [value], 10.0)] == [Status.OK]
        found = Value(memoryview(bytearray(256)), memoryview(bytearray(SIZE)))
        assert [*store.get_into([key], [found], 10.0)] == [Status.OK]
        assert found == value
        store.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
