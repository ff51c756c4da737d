"""A process with few file descriptors and many segments; run by `test_open_files`.

python -m plugins.file.tests.crowded DIRECTORY LIMIT SEGMENTS
"""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvgraft_file import FileBackend
from kvgraft_storage import Status, Value

from .opening import SIZE, pair
from .store import open_store

SEGMENT = 1 << 15
BATCH = 20


def n_open() -> int:
    return len(os.listdir("/proc/self/fd")) - 1


def store(backend: FileBackend, numbers: Sequence[int]) -> None:
    keys, values = zip(*[pair(number) for number in numbers])
    assert {*backend.set_from(keys, values, 60.0)} == {Status.OK}


def fetch(backend: FileBackend, numbers: Sequence[int]) -> None:
    keys, values = zip(*[pair(number) for number in numbers])
    found = [Value(memoryview(bytearray(256)), memoryview(bytearray(SIZE))) for _ in keys]
    assert {*backend.get_into(keys, found, 60.0)} == {Status.OK}
    assert found == list(values)


def main(directory: Path, limit: int, n_segments: int) -> None:
    before = n_open()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    most = 0
    capacity = (n_segments + 4) * SEGMENT
    writer, reader = (open_store(directory, capacity, SEGMENT) for _ in range(2))
    with ExitStack() as connections:
        for first in range(0, n_segments, BATCH):
            store(writer, range(first, first + BATCH))
            most = max(most, n_open())
        for backend in (writer, reader):
            for first in range(0, n_segments, BATCH):
                fetch(backend, range(first, first + BATCH))
                most = max(most, n_open())
            fetch(backend, range(0, n_segments, 7))
            backend.flush()
            assert backend.verify().n_records == n_segments
            most = max(most, n_open())
        n_found = backend.stats().details["segments"]
        for _ in range(limit // 4):
            for each in socket.socketpair():
                connections.enter_context(each)
        fetch(reader, range(n_segments - BATCH, n_segments))
    key, _ = pair(0)
    assert [*reader.remove([key])] == [Status.OK]
    store(writer, range(n_segments, n_segments + 3 * BATCH))
    again = open_store(directory, capacity // 8, SEGMENT)  # evicts hundreds at once
    store(again, [n_segments + 3 * BATCH])
    assert again.stats().nbytes <= capacity // 8
    again.clear()
    for backend in (writer, reader, again):
        backend.close()
    after = n_open()
    sys.stdout.write(json.dumps([n_found, most - before, after - before]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
