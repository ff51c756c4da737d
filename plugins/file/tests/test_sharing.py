"""Processes that share a directory read nothing wrong and keep to one capacity."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvgraft_file.disk import DiskFile
from kvgraft_storage import Status, Storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, settled, stored
from tests.commands import ROOT

from .sharing import CAPACITY, SEGMENT
from .store import open_store, segments
from .test_holes import large
from .test_written_over import KEYS, full, kept, opened, store

OK, MISS = Status.OK, Status.MISS
SIZE = 9000


def share(directory: Path, processes: int, operations: int) -> list[dict[str, int]]:
    command = [sys.executable, "-m", "plugins.file.tests.sharing", str(directory)]
    running = [
        subprocess.Popen(
            [*command, str(seed), str(operations)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(processes)
    ]
    counts = []
    for process in running:
        out, errors = process.communicate(timeout=250)
        assert process.returncode == 0, errors
        counts.append(json.loads(out.splitlines()[-1]))
    return counts


def expect_sound(directory: Path, counts: list[dict[str, int]]) -> None:
    for count in counts:
        assert count.get("ok", 0) > 100
        assert count["errors"] == 0
        assert count.get("down", 0) == 0
        assert count.get("stale", 0) == 0
    store = open_store(directory, CAPACITY, SEGMENT)
    assert store.verify().damaged == ()
    assert store.stats().nbytes <= CAPACITY
    store.close()


def test_two_processes_store_fetch_and_evict_in_one_directory(tmp_path: Path) -> None:
    expect_sound(tmp_path, share(tmp_path, 2, 150))


@pytest.mark.long
def test_four_processes_for_longer(tmp_path: Path) -> None:
    expect_sound(tmp_path, share(tmp_path, 4, 3000))


def test_one_opener_misses_records_that_the_other_evicts_or_clears(tmp_path: Path) -> None:
    one = Storage(FINGERPRINT, open_store(tmp_path, 1 << 19, 1 << 16))
    other = Storage(FINGERPRINT, open_store(tmp_path, 1 << 19, 1 << 16))
    places = addresses(100)
    assert stored(one, places[:4], SIZE) == [OK] * 4
    assert fetched(other, places[:4], SIZE) == [OK] * 4
    assert set(stored(one, places[4:], SIZE)) == {OK}
    told = fetched(other, places, SIZE)
    assert told[-1] is OK
    assert set(told) == {OK, MISS}
    ticket = other.ask("clear", lambda store: store.clear())
    assert ticket.wait(20)
    assert segments(tmp_path) == []
    assert stored(one, places[:4], SIZE) == [OK] * 4, "its own segment was cleared from under it"
    assert fetched(other, places[:4], SIZE) == [OK] * 4
    assert one.close()
    assert other.close()


def test_a_key_with_two_copies_is_there_until_both_are_gone(tmp_path: Path) -> None:
    one = Storage(FINGERPRINT, open_store(tmp_path, refresh_s=1000))
    other = Storage(FINGERPRINT, open_store(tmp_path, refresh_s=1000))
    places = addresses(2)
    stored(one, places, SIZE)
    stored(other, places, SIZE)
    third = Storage(FINGERPRINT, open_store(tmp_path))
    assert settled(third.remove(places[:1])) == [OK]
    for storage in (one, other, third, Storage(FINGERPRINT, open_store(tmp_path))):
        assert fetched(storage, places, SIZE) == [MISS, OK]
        assert storage.close()


@pytest.mark.parametrize("others", [1, 2], ids=["one size", "another size"])
def test_records_that_were_read_survive_others(tmp_path: Path, others: int) -> None:
    """Of one size they are not the ones written over; with their segment they are carried over."""
    storage = Storage(FINGERPRINT, open_store(tmp_path, 1 << 18, 1 << 16))
    places = addresses(60)
    stored(storage, places[:3], SIZE)
    for first in range(3, 60, 3):
        assert fetched(storage, places[:1], SIZE) == [OK], f"lost after {first} more"
        stored(storage, places[first : first + 3], others * SIZE)
    assert fetched(storage, places[1:3], SIZE) == [MISS, MISS]
    ticket = storage.ask("stats", lambda store: store.stats().details.get("carried", 0))
    assert ticket.wait(20)
    assert bool(ticket.value) is (others > 1)
    assert storage.close()


def test_a_writer_waits_while_another_process_has_its_next_bytes_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tmp_path)
    assert store(backend, [0]) == [OK]
    other = DiskFile(segments(tmp_path)[0], direct=False)
    other.mark(4 * 4096 + 4096, 4096)
    pauses: list[float] = []

    def unlocking(pause_s: float) -> None:
        pauses.append(pause_s)
        other.unlock()

    with monkeypatch.context() as patch:
        patch.setattr("kvgraft_file.disk.time.sleep", unlocking)
        assert store(backend, [1]) == [OK]
    assert len(pauses) == 1
    other.mark(8 * 4096 + 4096, 4096)
    with monkeypatch.context() as patch:
        patch.setattr("kvgraft_file.disk.LOCK_S", 0.0)
        assert store(backend, [2]) == [Status.TIMEOUT]
    other.let_go()
    assert store(backend, [3]) == [OK]
    assert kept(backend) == {0, 1, 3}
    assert backend.verify().damaged == ()
    backend.close()


def test_a_process_with_an_old_view_locks_nothing_of_a_segment_that_was_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(tmp_path).close()
    one, other = opened(tmp_path), opened(tmp_path)
    assert list(one.remove([KEYS[0], KEYS[1], KEYS[11]])) == [OK] * 3, "changes their stamps"
    one._writer._full_until = 0.0  # a second has passed
    assert list(one.set_from([KEYS[30]], [large(30)], 10.0)) == [OK]
    active = one._writer._active
    assert active is not None
    known = {each.file.inode for each in other._catalog.segments.values()}
    assert active.file.inode in known
    locked: set[int] = set()
    fcntl_given = fcntl.fcntl

    def noted(fd: int, command: int, argument: bytes) -> object:
        if command == fcntl.F_OFD_SETLK:
            locked.add(os.fstat(fd).st_ino)
        return fcntl_given(fd, command, argument)

    with monkeypatch.context() as patch:
        patch.setattr("kvgraft_file.disk.fcntl.fcntl", noted)
        other._catalog.look_again()
    assert locked, "of segments that are there"
    assert locked <= known - {active.file.inode}
    other.stats()
    assert kept(other) == kept(one)
    for backend in (one, other):
        assert backend.verify().damaged == ()
        backend.close()
