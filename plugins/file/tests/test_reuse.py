"""Segments made of evicted ones' blocks, and writes that are under way together."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest

from kvgraft_file import FileBackend
from kvgraft_file.disk import DiskFile
from kvgraft_file.writer import Writer
from kvgraft_storage import Status, Storage
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, settled, stored

from .store import open_store, segments

OK, MISS = Status.OK, Status.MISS
SIZE = 9000
CAPACITY, SEGMENT = 1 << 18, 1 << 16
PLACES = addresses(60)


def opened(directory: Path, refresh_s: float = 0) -> Storage:
    return Storage(FINGERPRINT, open_store(directory, CAPACITY, SEGMENT, refresh_s))


def expect_clean(directory: Path) -> None:
    store = open_store(directory, CAPACITY, SEGMENT)
    assert store.verify().damaged == ()
    store.close()


def test_a_new_segment_is_made_of_an_evicted_ones_blocks(tmp_path: Path) -> None:
    storage = opened(tmp_path)
    stored(storage, PLACES[:30], SIZE // 2)
    files = {os.fstat(fd).st_ino: path for path in segments(tmp_path) for fd in [_held(path)]}
    assert set(stored(storage, PLACES[30:], SIZE)) == {OK}
    now = {path.stat().st_ino: path for path in segments(tmp_path)}
    assert now.keys() == files.keys()
    assert not {*now.values()} & {*files.values()}
    assert {*fetched(storage, PLACES[:30], SIZE // 2)} == {MISS}
    assert fetched(storage, PLACES[-1:], SIZE) == [OK]
    assert storage.close()
    expect_clean(tmp_path)


def _held(path: Path) -> int:
    """A descriptor that is left open: its inode's number cannot be another file's."""
    return os.open(path, os.O_RDONLY)


def test_old_content_of_blocks_does_not_come_back_when_the_writer_is_killed(
    tmp_path: Path,
) -> None:
    directory, left = tmp_path / "one", tmp_path / "left"
    directory.mkdir()
    storage = opened(directory)
    stored(storage, PLACES, SIZE)
    assert stored(storage, PLACES[:1], SIZE) == [OK]
    now = fetched(storage, PLACES, SIZE)
    evicted = [place for place, told in zip(PLACES, now) if told is MISS]
    shutil.copytree(directory, left)
    after = opened(left)
    assert {*fetched(after, evicted, SIZE)} == {MISS}
    assert fetched(after, PLACES[:1], SIZE) == [OK]
    assert after.close()
    assert storage.close()
    expect_clean(left)


def test_reading_or_removing_an_evicted_record_is_a_miss_and_harms_nothing(
    tmp_path: Path,
) -> None:
    writer, reader, remover = opened(tmp_path), opened(tmp_path), opened(tmp_path)
    stored(writer, PLACES[:3], SIZE)
    for late in (reader, remover):
        assert fetched(late, PLACES[:3], SIZE) == [OK] * 3
    stored(writer, PLACES[3:], SIZE)
    known = {path.name: path.read_bytes() for path in segments(tmp_path)[:-1]}
    assert settled(remover.remove(PLACES[:3])) == [OK] * 3, "as far as it knew"
    assert fetched(reader, PLACES[:3], SIZE) == [MISS] * 3
    assert not reader.counters.snapshot().get("get.corrupt")
    assert known == {path.name: path.read_bytes() for path in segments(tmp_path)[:-1]}
    assert all(each.close() for each in (writer, reader, remover))
    expect_clean(tmp_path)


def test_blocks_that_are_written_over_in_the_middle_of_a_read_are_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = opened(tmp_path), opened(tmp_path, refresh_s=1000)
    stored(writer, PLACES[:3], SIZE)
    assert reader.ask("stats", lambda store: store.stats()).wait(60)
    read = DiskFile.read

    def overtaken(self: DiskFile, pieces: list[memoryview], offset: int) -> None:
        monkeypatch.setattr(DiskFile, "read", read)
        read(self, pieces[:1], offset)
        stored(writer, PLACES[3:], SIZE)
        read(self, pieces[1:], offset + len(pieces[0]))

    monkeypatch.setattr(DiskFile, "read", overtaken)
    assert fetched(reader, PLACES[:3], SIZE) == [MISS] * 3
    assert not reader.counters.snapshot().get("get.corrupt")
    assert writer.close()
    assert reader.close()
    expect_clean(tmp_path)


def test_a_store_cleared_while_records_wait_to_be_written_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = open_store(tmp_path, CAPACITY, SEGMENT), opened(tmp_path)
    storage, looked_up = Storage(FINGERPRINT, backend), Writer._is_there
    stored(storage, PLACES[:1], SIZE)
    asked: list[bytes] = []

    def clearing(self: Writer, key: bytes) -> bool:
        asked.append(key)
        if len(asked) == 3:
            assert other.ask("clear", lambda store: store.clear()).wait(60)
        return looked_up(self, key)

    monkeypatch.setattr(Writer, "_is_there", clearing)
    assert stored(storage, PLACES[1:30], SIZE) == [OK] * 29
    assert storage.last_error is None
    told = fetched(storage, PLACES[:30], SIZE)
    assert {*told[:3]} == {MISS}, "cleared"
    assert told[-1] is OK
    assert storage.close()
    assert other.close()
    expect_clean(tmp_path)


def test_threads_that_store_at_once_store_everything(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 4 << 20, SEGMENT)
    storage = Storage(FINGERPRINT, backend)
    tickets = [storage.set([place], [bytes(SIZE)]) for place in PLACES]
    assert [settled(ticket) for ticket in tickets] == [[OK]] * len(PLACES)
    assert backend.stats().n_records == len(PLACES)
    assert backend.verify().damaged == ()
    assert storage.close()


def test_a_write_that_fails_before_one_that_succeeds_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_store(tmp_path, 4 << 20, 1 << 20)
    storage, other = Storage(FINGERPRINT, backend), opened(tmp_path)
    write, begun, ended = DiskFile.write, threading.Event(), threading.Event()

    def failing(self: DiskFile, pieces: list[memoryview], offset: int) -> None:
        if offset == 4096:
            begun.set()
            assert ended.wait(60)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, pieces, offset)

    _begin_segment(backend, storage)
    monkeypatch.setattr(DiskFile, "write", failing)
    lost = storage.set(PLACES[:2], [bytes(SIZE)] * 2)
    assert begun.wait(60)
    assert stored(storage, PLACES[2:5], SIZE) == [OK] * 3
    assert backend.verify().damaged == (), "a record on its way is not damaged"
    ended.set()
    assert settled(lost) == [Status.DOWN] * 2
    monkeypatch.undo()
    assert fetched(storage, PLACES[:5], SIZE) == [MISS, MISS, OK, OK, OK]
    assert storage.close()
    assert fetched(other, PLACES[:5], SIZE) == [MISS, MISS, OK, OK, OK]
    assert other.close()


def _begin_segment(backend: FileBackend, storage: Storage) -> None:
    """An active segment without records: writes from now on are records'."""
    with backend._writing:
        assert backend._writer._ensure_free(SIZE, 5.0) is None
        assert backend._writer._fits(0, SIZE)
