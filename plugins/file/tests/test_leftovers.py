"""Leftovers of processes and special files do not keep a store from being opened."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvgraft.errors import ConfigError
from kvgraft_file.directory import Directory
from kvgraft_storage import Status, Storage
from kvgraft_storage.files import unfinished_path
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, stored
from tests.commands import ROOT, run

from .opening import DIED, open_shared, pair
from .store import open_store, segments

OK, MISS = Status.OK, Status.MISS
SIZE = 9000
CAPACITY, SEGMENT = 3 << 18, 1 << 16
PLACES = addresses(60)
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""Runs a command as the first process of its own namespace."""


def can_contain() -> bool:
    try:
        return run(*CONTAINER, "true").returncode == 0
    except FileNotFoundError:
        return False


HERE = pytest.param((), id="one namespace")
CONTAINED = pytest.param(
    CONTAINER,
    id="a namespace each",
    marks=pytest.mark.skipif(not can_contain(), reason="may not make pid namespaces"),
)


def opened(directory: Path) -> Storage:
    return Storage(FINGERPRINT, open_store(directory, CAPACITY, SEGMENT))


def expect_works(directory: Path, *foreign: str) -> None:
    """A store can be opened, filled, read, evicted from and closed, and leaves nothing behind."""
    storage = opened(directory)
    for first in range(0, 60, 6):
        assert stored(storage, PLACES[first : first + 6], SIZE) == [OK] * 6
        assert fetched(storage, PLACES[first : first + 6], SIZE) == [OK] * 6
    assert storage.last_error is None
    assert storage.close()
    store = open_store(directory, CAPACITY, SEGMENT)
    assert [each for each in store.verify().damaged if each.where not in foreign] == []
    store.close()


def unfinished(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.suffix == ".tmp"]


def started(
    prefix: Sequence[str], directory: Path, opens: int, first: int = 0
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [
            *prefix,
            sys.executable,
            "-m",
            "plugins.file.tests.opening",
            directory,
            str(opens),
            str(first),
        ],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def open_together(directory: Path, prefix: Sequence[str], opens: int) -> None:
    running = [started(prefix, directory, opens, number * opens) for number in range(3)]
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in running:
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
    assert unfinished(directory) == []
    store = open_shared(directory)
    keys = [pair(number)[0] for number in range(3 * opens)]
    assert [*store.exists(keys)] == [True] * len(keys)
    assert store.verify().n_records == len(keys)
    store.close()


@pytest.mark.parametrize("prefix", [HERE, CONTAINED])
def test_three_processes_open_a_new_directory_at_once(
    tmp_path: Path, prefix: Sequence[str]
) -> None:
    open_together(tmp_path, prefix, 12)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("prefix", [HERE, CONTAINED])
def test_three_processes_open_a_new_directory_40_times_each(
    tmp_path: Path, prefix: Sequence[str], seed: int
) -> None:
    open_together(tmp_path, prefix, 40)


@pytest.mark.parametrize("prefix", [HERE, CONTAINED])
def test_a_process_of_the_same_id_ended_while_it_made_a_segment(
    tmp_path: Path, prefix: Sequence[str]
) -> None:
    process = started(prefix, tmp_path, 0)
    process.communicate("\n", timeout=60)
    assert process.returncode == DIED
    assert len(unfinished(tmp_path)) == 1
    process = started(prefix, tmp_path, 1)
    _, errors = process.communicate("\n", timeout=60)
    assert process.returncode == 0, errors
    assert unfinished(tmp_path) == []


def former_names() -> list[str]:
    """Names that a former version gave to files of this very process."""
    pid, thread = os.getpid(), os.getppid()
    return [f".{number:016x}-{pid}.tmp" for number in range(1, 9)] + [f".probe-{pid}-{thread}.tmp"]


def test_leftovers_named_by_this_process_id_are_removed(tmp_path: Path) -> None:
    for name in former_names():
        (tmp_path / name).write_bytes(bytes(SEGMENT))
    expect_works(tmp_path)
    assert unfinished(tmp_path) == []


def test_leftovers_are_removed_when_a_store_is_opened(tmp_path: Path) -> None:
    unfinished_path(tmp_path, "kvgraft").write_bytes(bytes(SEGMENT))
    open_store(tmp_path).close()
    assert unfinished(tmp_path) == []


def test_a_locked_unfinished_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / former_names()[0]
    with path.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        expect_works(tmp_path)
        assert path.exists()
    expect_works(tmp_path)
    assert not path.exists()


def as_directory(path: Path) -> None:
    path.mkdir()


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


def as_link(path: Path) -> None:
    target = path.parent.parent / "target"
    target.write_bytes(b"of somebody else")
    path.symlink_to(target)


def as_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "target")


def as_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def as_device(path: Path) -> None:
    try:
        os.mknod(path, 0o020600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("may not make devices")


KINDS: list[Callable[[Path], None]] = [
    as_directory,
    as_pipe,
    as_link,
    as_dangling_link,
    as_socket,
    as_device,
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@every_kind
def test_a_lock_that_is_no_regular_file_is_refused(
    tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    kind(directory / "kvgraft.lock")
    with pytest.raises(
        ConfigError, match=r"kvgraft\.lock is no regular file; remove it"
    ) as refused:
        open_store(directory)
    assert "\n" not in str(refused.value)
    target = tmp_path / "target"
    assert not target.exists() or target.read_bytes() == b"of somebody else"
    assert unfinished(directory) == []


@every_kind
def test_a_special_file_is_neither_a_segment_nor_a_leftover(
    tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    names = [f"{1:016x}.kvseg", f".{2:016x}-{os.getpid()}.tmp", f".kvgraft-{3:032x}.tmp"]
    for name in names:
        kind(directory / name)
    expect_works(directory)
    assert all(os.path.lexists(directory / name) for name in names)
    target = tmp_path / "target"
    assert not target.exists() or target.read_bytes() == b"of somebody else"


@every_kind
def test_a_segment_that_becomes_something_else_is_a_miss(
    tmp_path: Path, kind: Callable[[Path], None]
) -> None:
    directory = tmp_path / "store"
    directory.mkdir()
    storage = opened(directory)
    assert stored(storage, PLACES[:3], SIZE) == [OK] * 3
    assert storage.close()
    storage = opened(directory)
    (path,) = segments(directory)
    path.unlink()
    kind(path)
    assert fetched(storage, PLACES[:3], SIZE) == [MISS] * 3
    assert stored(storage, PLACES[:3], SIZE) == [OK] * 3
    assert storage.last_error is None
    assert storage.close()


def test_stores_agree_on_one_lock_although_it_was_removed(tmp_path: Path) -> None:
    one = Directory(tmp_path)
    (tmp_path / "kvgraft.lock").unlink()
    other = Directory(tmp_path)
    with one.locked(1.0), pytest.raises(TimeoutError), other.locked(0.05):
        pass
    with other.locked(1.0):
        pass
    one.close()
    other.close()


@pytest.mark.parametrize("name", ["7fffffffffffffff", "7ffffffffffffffe", "0000000000000000"])
def test_a_file_of_the_last_name_leaves_names_for_segments(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.kvseg"
    path.write_bytes(bytes(100))
    expect_works(tmp_path, str(path))


def test_a_cleared_store_does_not_take_a_new_segment_for_an_old_one(tmp_path: Path) -> None:
    reader = Storage(FINGERPRINT, open_store(tmp_path, CAPACITY, SEGMENT, refresh_s=1000))
    writer = opened(tmp_path)
    assert stored(writer, PLACES[:3], SIZE) == [OK] * 3
    before = segments(tmp_path)
    assert writer.ask("clear", lambda store: store.clear()).wait(20)
    assert stored(writer, PLACES[3:6], SIZE) == [OK] * 3
    assert not {*before} & {*segments(tmp_path)}
    assert reader.close()
    assert writer.close()
