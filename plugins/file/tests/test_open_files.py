"""A store has a bounded number of files open, however many segments it has."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kvgraft.errors import ConfigError
from kvgraft_file import FileOptions
from kvgraft_storage import Status, Storage, Value
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, settled, stored
from tests.commands import KVGRAFT, ROOT, run

from .opening import pair
from .store import open_store, segments

OK, MISS = Status.OK, Status.MISS
SIZE = 9000
SEGMENT = 1 << 15
"""One record of this size."""

PLACES = addresses(60)


def n_open(directory: Path) -> int:
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += each.readlink().is_relative_to(directory)
    return found


def opened(directory: Path, most: int = 8) -> Storage:
    store = open_store(directory, 64 * SEGMENT, SEGMENT, max_open_files=most)
    return Storage(FINGERPRINT, store)


@pytest.fixture
def low_limit() -> Iterator[int]:
    """A soft limit a little above the number of open files."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = len(os.listdir("/proc/self/fd")) + 20  # numbers above it stay open
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def crowd(directory: Path, limit: int, n: int) -> None:
    command = (sys.executable, "-m", "plugins.file.tests.crowded", directory, str(limit), str(n))
    done = run(*command, cwd=ROOT, timeout_s=240)
    assert done.returncode == 0, done.stderr
    n_segments, most, left = json.loads(done.stdout)
    assert n_segments >= n
    assert most <= 2 * (limit // 8 + 8), "two stores"
    assert left == 0


def test_a_process_with_few_descriptors_uses_many_segments_and_sockets(tmp_path: Path) -> None:
    crowd(tmp_path, 96, 120)


@pytest.mark.long
def test_a_process_with_256_descriptors_uses_800_segments_and_sockets(tmp_path: Path) -> None:
    crowd(tmp_path, 256, 800)


def test_segments_that_are_not_used_are_closed_and_opened_again(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    assert {*stored(storage, PLACES, SIZE)} == {OK}
    assert len(segments(tmp_path)) == len(PLACES)
    assert n_open(tmp_path) <= 8 + 4
    assert {*fetched(storage, PLACES, SIZE)} == {OK}
    assert n_open(tmp_path) <= 8 + 4
    assert settled(storage.remove(PLACES[:30])) == [OK] * 30
    assert {*fetched(storage, PLACES[:30], SIZE)} == {MISS}
    assert storage.flush().wait(20)
    assert storage.close()
    assert n_open(tmp_path) == 0


def test_a_closed_segment_that_is_another_now_is_a_miss(tmp_path: Path) -> None:
    """Its name and number on the file system may be the same."""
    storage = opened(tmp_path)
    assert {*stored(storage, PLACES, SIZE)} == {OK}
    first, second = segments(tmp_path)[:2]
    content = bytearray(second.read_bytes())
    first.write_bytes(content)
    assert fetched(storage, PLACES[:2], SIZE) == [MISS, OK]
    assert settled(storage.remove(PLACES[:1])) == [MISS]
    assert first.read_bytes() == content, "nothing is removed from another's segment"
    assert storage.last_error is None
    assert storage.close()


def test_without_descriptors_idle_segments_are_closed(tmp_path: Path, low_limit: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low_limit + 80, hard))
    storage = opened(tmp_path, 40)
    assert {*stored(storage, PLACES, SIZE)} == {OK}
    assert n_open(tmp_path) > 30
    taken, more = [], addresses(3, first=60)
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        assert error.errno == errno.EMFILE  # noqa: PT017 - the limit is part of the scene
    try:
        assert {*fetched(storage, PLACES, SIZE)} == {OK}
        assert stored(storage, more, SIZE) == [OK] * 3
        assert fetched(storage, addresses(1, first=99), SIZE) == [MISS]
        assert storage.flush().wait(20)
    finally:
        for fd in taken:
            os.close(fd)
    assert storage.last_error is None
    assert storage.close()


def test_threads_read_while_segments_are_closed_and_evicted(tmp_path: Path) -> None:
    store = open_store(tmp_path, 24 * SEGMENT, SEGMENT, max_open_files=8)
    pairs = [pair(number) for number in range(60)]
    wrong: list[object] = []

    def use(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            some = chance.sample(pairs, 6)
            keys = [key for key, _ in some]
            try:
                if chance.random() < 0.3:
                    store.set_from(keys, [value for _, value in some], 20.0)
                elif chance.random() < 0.1:
                    store.remove(keys[:1])
                rooms = [
                    Value(memoryview(bytearray(256)), memoryview(bytearray(SIZE))) for _ in keys
                ]
                for status, found, (_, value) in zip(
                    store.get_into(keys, rooms, 20.0), rooms, some
                ):
                    if (status is OK and found != value) or status not in (OK, MISS):
                        wrong.append(status)
            except Exception as error:  # noqa: BLE001 - shown below
                wrong.append(error)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert n_open(tmp_path) <= 8 + 3
    store.close()
    assert n_open(tmp_path) == 0


def test_too_few_descriptors_are_refused_with_numbers(tmp_path: Path, low_limit: int) -> None:
    with pytest.raises(ConfigError) as refused:
        open_store(tmp_path)
    said = str(refused.value)
    assert said.startswith(f"storage 'file': {tmp_path}: max_open_files 8 + 24 at work > ")
    assert said.endswith(f" left of {low_limit}; raise the limit (ulimit -n) or close files")
    assert n_open(tmp_path) == 0


def test_more_open_files_than_there_are_descriptors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_open_files 100000000 \+ 24 at work > "):
        opened(tmp_path, 100_000_000)


def test_the_command_refuses_too_few_descriptors_in_a_line(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    done = run("sh", "-c", f"ulimit -n 24; exec {KVGRAFT} storage stats file:{tmp_path}")
    assert done.returncode == 2
    assert "raise the limit (ulimit -n)" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_large_capacities_have_larger_segments() -> None:
    def segment(capacity: str, **given: object) -> int:
        return FileOptions.model_validate({"capacity": capacity, **given}).segment_nbytes

    assert segment("1MiB") == 1 << 17
    assert segment("10GiB") == segment("64GiB") == 64 << 20
    assert segment("1TiB") == 1 << 30
    assert segment("100TiB") == 4 << 30
    assert segment("1TiB", segment="8MiB") == 8 << 20
    with pytest.raises(ValueError, match="less than or equal to 4294967296"):
        segment("1TiB", segment="5GiB")
