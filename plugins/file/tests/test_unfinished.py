"""Records that are not wholly written: no reader takes them for whole, even if the writer ends."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvgraft.errors import ConfigError
from kvgraft_file.disk import DiskFile
from kvgraft_file.segment import Segment
from kvgraft_file.writer import Writer
from kvgraft_storage import Status, Storage, Value
from kvgraft_testing.storage.traffic import (
    FINGERPRINT,
    addresses,
    fetched,
    payload,
    settled,
    stored,
)

from .store import open_store, segments

OK, MISS = Status.OK, Status.MISS
SIZE = 9000
CAPACITY, SEGMENT = 1 << 18, 1 << 16
PLACES = addresses(60)
RECORD = 4096 + 12288
"""Bytes of a record of this size in a segment."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read error is retried at once."""
    monkeypatch.setattr("kvgraft_file.segment.RETRY_BACKOFF", 0)


def opened(directory: Path) -> Storage:
    return Storage(FINGERPRINT, open_store(directory, CAPACITY, SEGMENT, 0))


@contextmanager
def block_by_block(between: Callable[[], object]) -> Iterator[None]:
    """Something happens after the first block of every write of more than one."""

    def write(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        given(self, pieces[:1], offset)
        if len(pieces) > 1:
            between()
            given(self, pieces[1:], offset + len(pieces[0]))

    given = DiskFile.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "write", write)
        yield


@contextmanager
def torn_block(offset: int, error: int | None = None) -> Iterator[None]:
    """The process ends with a block unwritten, though data behind it is written."""

    def write(self: DiskFile, pieces: Sequence[memoryview], where: int) -> None:
        if where == offset and len(pieces) > 1:
            given(self, pieces[1:], where + len(pieces[0]))
            if error is not None:
                raise OSError(error, os.strerror(error))
        else:
            given(self, pieces, where)

    given = DiskFile.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "write", write)
        yield


@contextmanager
def unreadable(paths: Sequence[Path], bad: set[int]) -> Iterator[None]:
    """Reading these blocks of some files fails, for every reader."""
    given = DiskFile.read

    def read(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        end = offset + sum(map(len, pieces))
        if self.path in paths and any(offset <= each < end for each in bad):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        given(self, pieces, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "read", read)
        yield


def killed_while_writing(directory: Path, n_before: int) -> None:
    """A process stores some, and is killed when it has written the first block of one more."""
    child = os.fork()
    if not child:
        storage = opened(directory)
        stored(storage, PLACES[:n_before], SIZE)
        with block_by_block(lambda: os.kill(os.getpid(), signal.SIGKILL)):
            stored(storage, PLACES[n_before : n_before + 1], SIZE)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)


def killed_behind_a_hole(directory: Path) -> None:
    """A process stores three, of which the second's block does not reach the disk, and dies."""
    child = os.fork()
    if not child:
        storage = opened(directory)
        with torn_block(4096 + RECORD):
            for number in range(3):
                stored(storage, PLACES[number : number + 1], SIZE)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def expect_whole(directory: Path, n_records: int) -> None:
    store = open_store(directory, CAPACITY, SEGMENT)
    report = store.verify()
    assert (report.n_records, report.damaged) == (n_records, ())
    store.close()


def test_another_writers_record_is_missing_until_it_is_written(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert go_on.wait(20)

    writer, reader = opened(tmp_path), opened(tmp_path)
    assert stored(writer, PLACES[:2], SIZE) == [OK] * 2
    with block_by_block(pause):
        ticket = writer.set(PLACES[2:3], [payload(PLACES[2], SIZE)])
        assert inside.wait(20)
        assert settled(reader.exists(PLACES[:3])) == [OK, OK, MISS]
        assert fetched(reader, PLACES[:3], SIZE) == [OK, OK, MISS]
        go_on.set()
        assert settled(ticket) == [OK]
    for each in (reader, writer):
        assert fetched(each, PLACES[:3], SIZE) == [OK] * 3
        assert each.close()
    expect_whole(tmp_path, 3)


@pytest.mark.parametrize("seen", [0, 2])
def test_unfinished_records_of_a_killed_writer_are_missing(tmp_path: Path, seen: int) -> None:
    storage = opened(tmp_path)
    assert stored(storage, PLACES[30:31], SIZE) == [OK]
    killed_while_writing(tmp_path, 2)
    if seen:
        assert settled(storage.exists(PLACES[:2])) == [OK] * 2
    assert settled(storage.exists(PLACES[:3])) == [OK, OK, MISS]
    assert stored(storage, PLACES[2:3], SIZE) == [OK]
    assert fetched(storage, PLACES[:3], SIZE) == [OK] * 3
    assert storage.close()
    expect_whole(tmp_path, 4)


def test_opening_the_store_of_a_killed_writer_finds_its_whole_records(
    tmp_path: Path,
) -> None:
    killed_while_writing(tmp_path, 2)
    first, second = opened(tmp_path), opened(tmp_path)
    for storage in (first, second):
        assert fetched(storage, PLACES[:3], SIZE) == [OK, OK, MISS]
        assert storage.counters.snapshot().get("get.corrupt") is None
        assert storage.close()
    expect_whole(tmp_path, 2)


def test_records_that_a_disk_failed_to_write_are_missing_for_others(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    writer, reader = opened(tmp_path), opened(tmp_path)
    assert stored(writer, PLACES[:1], SIZE) == [OK]
    with block_by_block(fail):
        assert stored(writer, PLACES[1:2], SIZE) == [Status.DOWN]
    assert settled(reader.exists(PLACES[:2])) == [OK, MISS]
    assert stored(writer, PLACES[2:3], SIZE) == [OK]
    assert writer.close()
    assert fetched(reader, PLACES[:3], SIZE) == [OK, MISS, OK]
    assert reader.close()
    expect_whole(tmp_path, 2)


def test_keys_reported_as_there_are_durable_after_a_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = opened(tmp_path), opened(tmp_path)
    assert stored(writer, PLACES[:1], SIZE) == [OK]
    (path,) = segments(tmp_path)
    synced = set()
    monkeypatch.setattr(os, "fdatasync", lambda fd: synced.add(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.add(os.fstat(fd).st_ino))
    kept = other.set(PLACES[:1], [payload(PLACES[0], SIZE)], only_missing=True)
    assert settled(kept) == [OK]
    assert other.flush().wait(20)
    assert {path.stat().st_ino, tmp_path.stat().st_ino} <= synced
    assert segments(tmp_path) == [path]
    assert other.close()
    assert writer.close()


def test_a_segment_that_is_being_reclaimed_is_not_found_again_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = opened(tmp_path)
    given = Writer._claim

    def claim(self: Writer, claims: ExitStack) -> Segment | None:
        claimed = given(self, claims)
        with self._lock:
            self._catalog.refresh()  # as a reader's thread may at any time
        return claimed

    monkeypatch.setattr(Writer, "_claim", claim)
    for first in range(0, 60, 6):
        assert stored(storage, PLACES[first : first + 6], SIZE) == [OK] * 6
    assert storage.last_error is None
    assert fetched(storage, PLACES[54:], SIZE) == [OK] * 6
    assert storage.close()


def test_others_find_nothing_torn_while_one_scans_an_ended_writers_segment(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 2)
    (path,) = segments(tmp_path)
    scanning = DiskFile(path, direct=False)
    assert scanning.try_lock()
    other = opened(tmp_path)
    assert settled(other.exists(PLACES[:3])) == [MISS] * 3, "no record is known to be whole"
    scanning.unlock()
    scanning.let_go()
    assert settled(other.exists(PLACES[:3])) == [OK, OK, MISS]
    assert other.close()
    expect_whole(tmp_path, 2)


def test_flushed_records_of_an_ended_writer_stay_with_any_headers(tmp_path: Path) -> None:
    """A backend moves bytes: a header of another format is not its business."""
    child = os.fork()
    if not child:
        store = open_store(tmp_path, CAPACITY, SEGMENT)
        value = Value(memoryview(b"h" * 256), memoryview(b"p" * SIZE))
        store.set_from([b"k" * 32], [value], 5.0)
        store.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    store = open_store(tmp_path, CAPACITY, SEGMENT)
    assert store.exists([b"k" * 32]) == [True]
    store.close()


def test_a_payload_that_the_disk_does_not_give_is_looked_at_again(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, 2)
    with unreadable(segments(tmp_path), {8192}):  # behind the first record's block
        storage = opened(tmp_path)
        assert settled(storage.exists(PLACES[:3])) == [MISS] * 3, "none is known to be whole"
    assert fetched(storage, PLACES[:3], SIZE) == [OK, OK, MISS]
    assert storage.close()
    expect_whole(tmp_path, 2)


def test_a_gap_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    killed_behind_a_hole(tmp_path)

    def write_block(self: DiskFile, content: bytes, offset: int) -> None:
        if self.path.suffix == ".kvseg":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        given(self, content, offset)

    given = DiskFile.write_block
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "write_block", write_block)
        storage = opened(tmp_path)
        assert settled(storage.exists(PLACES[:3])) == [OK, MISS, MISS]
    assert fetched(storage, PLACES[:3], SIZE) == [OK, MISS, OK]
    assert storage.close()
    expect_whole(tmp_path, 2)


def test_a_segment_that_is_sealed_while_it_is_looked_at_is_not_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = opened(tmp_path)
    assert stored(writer, PLACES[:3], SIZE) == [OK] * 3
    (path,) = segments(tmp_path)
    with path.open("r+b") as file:  # the first record's block is damaged
        file.seek(4096)
        file.write(bytes(4096))
    given = DiskFile.try_lock

    def try_lock(self: DiskFile) -> bool:
        monkeypatch.setattr(DiskFile, "try_lock", given)
        assert writer.close()
        return given(self)

    reader = open_store(tmp_path, CAPACITY, SEGMENT, refresh_s=1000)
    monkeypatch.setattr(DiskFile, "try_lock", try_lock)
    with reader._lock:
        reader._catalog.refresh()
    reader.close()
    other = opened(tmp_path)
    assert fetched(other, PLACES[:3], SIZE) == [MISS, OK, OK]
    assert other.close()


def test_waiting_writes_are_dropped_when_the_store_is_closed(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def pause() -> None:
        inside.set()
        assert go_on.wait(20)

    store = open_store(tmp_path, CAPACITY, SEGMENT)
    values = [Value(memoryview(bytes(256)), memoryview(b"p" * SIZE)) for _ in range(8)]
    told: list[object] = []

    def write(first: int) -> None:
        keys = [bytes([first + number]) * 32 for number in range(8)]
        try:
            told.append(list(store.set_from(keys, values, 20.0)))
        except ConfigError as error:
            told.append(str(error))

    with block_by_block(pause):
        threads = [threading.Thread(target=write, args=(first,)) for first in (0, 8, 16)]
        threads[0].start()
        assert inside.wait(20)
        for thread in threads[1:]:
            thread.start()
        closing = threading.Thread(target=store.close)
        closing.start()
        go_on.set()
        for thread in (*threads, closing):
            thread.join(20)
    assert len(told) == 3
    assert all(each == [OK] * 8 or "was closed; open it again" in str(each) for each in told)
    assert all(path.stat().st_size < SEGMENT for path in segments(tmp_path)), "all are sealed"


def test_a_hole_that_a_killed_writer_left_is_no_damage(tmp_path: Path) -> None:
    killed_behind_a_hole(tmp_path)
    storage = opened(tmp_path)
    assert fetched(storage, PLACES[:3], SIZE) == [OK, MISS, OK]
    assert storage.close()
    expect_whole(tmp_path, 2)


def test_a_write_that_fails_in_front_of_another_leaves_no_damage_and_hides_nothing(
    tmp_path: Path,
) -> None:
    writer, reader = opened(tmp_path), opened(tmp_path)
    inside, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        inside.set()
        assert go_on.wait(20)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert stored(writer, PLACES[:1], SIZE) == [OK]
    with block_by_block(fail):
        ticket = writer.set(PLACES[1:2], [payload(PLACES[1], SIZE)])
        assert inside.wait(20)
    assert stored(writer, PLACES[2:3], SIZE) == [OK]
    assert settled(reader.exists(PLACES[:3])) == [OK, MISS, MISS], "the start of 2 is unknown"
    go_on.set()
    assert settled(ticket) == [Status.DOWN]
    assert settled(reader.exists(PLACES[:3])) == [OK, MISS, OK]
    assert fetched(reader, PLACES[:3], SIZE) == [OK, MISS, OK]
    for each in (reader, writer):
        assert each.close()
    expect_whole(tmp_path, 2)


@pytest.mark.parametrize("ending", ["closed", "killed"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_read_error_is_a_miss_for_as_long_as_it_lasts(
    tmp_path: Path, ending: str, place: int
) -> None:
    child = os.fork()
    if not child:
        storage = opened(tmp_path)
        stored(storage, PLACES[:3], SIZE)
        if ending == "closed":
            storage.close()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    where = 4096 + place * RECORD
    with unreadable(segments(tmp_path), {where}):
        storage = opened(tmp_path)
        assert fetched(storage, PLACES[:3], SIZE) == [OK] * place + [MISS] * (3 - place)
        assert storage.last_error is None
        checking = open_store(tmp_path, CAPACITY, SEGMENT)
        assert [each.where for each in checking.verify().damaged] == [
            f"{segments(tmp_path)[0]}@{where}"
        ]
        checking.close()
    assert fetched(storage, PLACES[:3], SIZE) == [OK] * 3
    assert storage.close()
    expect_whole(tmp_path, 3)


def test_records_with_read_errors_are_not_retried_before_the_backoff_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgraft_file.segment.RETRY_BACKOFF", 1e9)
    writer = opened(tmp_path)
    assert stored(writer, PLACES[:3], SIZE) == [OK] * 3
    assert writer.close()
    with unreadable(segments(tmp_path), {4096 + RECORD}):
        storage = opened(tmp_path)
        assert settled(storage.exists(PLACES[:3])) == [OK, MISS, MISS]
    assert settled(storage.exists(PLACES[:3])) == [OK, MISS, MISS], "nobody has looked again"
    assert storage.close()


def test_where_the_disk_gives_no_segment_at_all_there_are_misses(tmp_path: Path) -> None:
    writer = opened(tmp_path)
    assert stored(writer, PLACES[:6], SIZE) == [OK] * 6
    assert writer.close()
    with unreadable(segments(tmp_path), {0}):
        storage = opened(tmp_path)
        assert fetched(storage, PLACES[:6], SIZE) == [MISS] * 6
        for first in range(6, 60, 3):
            assert stored(storage, PLACES[first : first + 3], SIZE) == [OK] * 3
            assert sum(path.stat().st_size for path in segments(tmp_path)) <= CAPACITY
    assert fetched(storage, PLACES[:6], SIZE) == [OK] * 6
    assert storage.close()


def test_a_late_removal_of_an_unwritten_record_removes_nothing_else(tmp_path: Path) -> None:
    """A reader has taken in a record whose write then failed, and removes it when it reads it."""
    writer, reader = opened(tmp_path), open_store(tmp_path, CAPACITY, SEGMENT)
    assert stored(writer, PLACES[:1], SIZE) == [OK]
    given = DiskFile.is_locked
    inside, go_on = threading.Event(), threading.Event()

    def fail() -> None:
        inside.set()
        assert go_on.wait(20)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def is_locked(self: DiskFile, offset: int, nbytes: int) -> bool:
        if offset == 4096 + RECORD:  # the reader has read the block, and looks too late
            go_on.set()
            assert settled(ticket) == [Status.DOWN]
        return given(self, offset, nbytes)

    with block_by_block(fail), pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "is_locked", is_locked)
        ticket = writer.set(PLACES[1:2], [payload(PLACES[1], SIZE)])
        assert inside.wait(20)
        assert list(reader.exists([PLACES[1].key])) == [True]
    assert stored(writer, PLACES[2:4], SIZE) == [OK] * 2
    assert list(reader.remove([PLACES[1].key])) == [OK]
    reader.close()
    assert writer.close()
    again = opened(tmp_path)
    assert fetched(again, PLACES[:4], SIZE) == [OK, MISS, OK, OK]
    assert again.close()
    expect_whole(tmp_path, 3)


def test_a_write_that_cannot_be_locked_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = opened(tmp_path), opened(tmp_path)
    assert stored(writer, PLACES[:1], SIZE) == [OK]

    def mark(self: DiskFile, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "mark", mark)
        assert stored(writer, PLACES[1:2], SIZE) == [Status.DOWN]
    assert stored(writer, PLACES[2:3], SIZE) == [OK]
    assert settled(reader.exists(PLACES[:3])) == [OK, MISS, OK]
    for each in (reader, writer):
        assert each.close()
    expect_whole(tmp_path, 2)


def test_every_record_of_a_write_that_failed_is_removed(tmp_path: Path) -> None:
    """Its blocks have reached the disk; one of them cannot be written again."""
    writer, reader = opened(tmp_path), opened(tmp_path)
    assert stored(writer, PLACES[:1], SIZE) == [OK]

    def write(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        if len(pieces) == 1 and offset == 4096 + RECORD:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        given(self, pieces, offset)
        if len(pieces) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    given = DiskFile.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "write", write)
        assert stored(writer, PLACES[1:3], SIZE) == [Status.DOWN] * 2
    assert settled(reader.exists(PLACES[:3])) == [OK, OK, MISS], "it was written whole after all"
    for each in (reader, writer):
        assert each.close()


def test_failing_writes_evict_only_for_their_first_segment(tmp_path: Path) -> None:
    writer = open_store(tmp_path, CAPACITY, SEGMENT)
    storage = Storage(FINGERPRINT, writer)
    for first in range(0, 12, 3):
        assert stored(storage, PLACES[first : first + 3], SIZE) == [OK] * 3
    before = writer.stats().n_records

    def fail() -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with block_by_block(fail):
        for number in range(12, 60):
            value = Value(memoryview(bytes(256)), memoryview(b"p" * SIZE))
            with pytest.raises(OSError, match="Input/output"):
                writer.set_from([PLACES[number].key], [value], 5.0)
    assert writer.stats().n_records >= before - 3
    assert stored(storage, PLACES[12:15], SIZE) == [OK] * 3
    assert storage.close()
