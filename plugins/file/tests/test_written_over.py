"""A store that is full writes over the least recently used records, each in its place."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft_file import FileBackend
from kvgraft_file.disk import DiskFile
from kvgraft_file.segment import Segment
from kvgraft_file.shared_hints import NAME, SharedHints
from kvgraft_storage import Status, Storage, Value
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, record, room, stored

from .store import open_store, segments

OK, MISS = Status.OK, Status.MISS
SIZE = 9000
CAPACITY, SEGMENT = 1 << 18, 1 << 16
N_RECORDS = 12
"""Records of this size that fit into the store."""

PLACES = addresses(60)
KEYS = [place.key for place in PLACES]


def opened(directory: Path) -> FileBackend:
    return open_store(directory, CAPACITY, SEGMENT)


def whole(number: int) -> Value:
    content = memoryview(record(PLACES[number], SIZE))
    return Value(content[:HEADER_NBYTES], content[HEADER_NBYTES:])


def store(backend: FileBackend, numbers: Sequence[int]) -> list[Status]:
    keys = [KEYS[number] for number in numbers]
    return list(backend.set_from(keys, [whole(number) for number in numbers], 10.0))


def kept(backend: FileBackend) -> set[int]:
    """The numbers of the records that are there, without a use of them."""
    hints = backend.probably_has(KEYS)
    return {number for number, hint in enumerate(hints) if hint}


def full(directory: Path) -> FileBackend:
    """A store with the records 0 to 11, the first of them used longest ago."""
    backend = opened(directory)
    for number in range(N_RECORDS):
        assert store(backend, [number]) == [OK]
    assert kept(backend) == {*range(N_RECORDS)}
    return backend


def test_a_process_that_was_behind_writes_over_what_all_processes_used_least(
    tmp_path: Path,
) -> None:
    """It opened the store before the uses of its first records were written down."""
    first, behind = full(tmp_path), opened(tmp_path)
    assert store(first, [N_RECORDS]) == [OK]
    first.close()
    assert store(opened(tmp_path), [N_RECORDS + 1]) == [OK]
    assert store(behind, [N_RECORDS + 2]) == [OK]
    assert {N_RECORDS, N_RECORDS + 1, N_RECORDS + 2} <= kept(opened(tmp_path))


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["store", "touch", "exists", "get"]),
        st.lists(st.integers(0, 24), min_size=1, max_size=4, unique=True),
    ),
    max_size=25,
)


@given(CALLS)
@settings(max_examples=25, deadline=None)
def test_it_keeps_what_least_recently_used_order_of_records_keeps(
    calls: list[tuple[str, list[int]]],
) -> None:
    with tempfile.TemporaryDirectory() as made:
        backend = full(Path(made))
        model = OrderedDict.fromkeys(range(N_RECORDS))
        for verb, numbers in calls:
            keys = [KEYS[number] for number in numbers]
            order = numbers[::-1]
            if verb == "store":
                assert {*store(backend, numbers)} == {OK}
                for number in numbers:
                    if number in model:
                        model.move_to_end(number)
                    else:
                        model.popitem(last=False)
                model |= {number: None for number in numbers if number not in model}
            elif verb == "touch":
                backend.touch(keys)
                order = numbers
            elif verb == "exists":
                assert list(backend.exists(keys)) == [number in model for number in numbers]
            else:
                told = backend.get_into(keys, [room(SIZE) for _ in keys], 10.0)
                assert [each is OK for each in told] == [number in model for number in numbers]
            for number in order:
                if number in model:
                    model.move_to_end(number)
            assert kept(backend) == {*model}
        assert backend.verify().damaged == ()
        backend.close()


def test_nothing_but_the_record_itself_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = full(tmp_path)
    before = {path: path.stat().st_ino for path in segments(tmp_path)}
    written: list[int] = []
    write = DiskFile.write

    def counted(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        written.append(sum(map(len, pieces)))
        write(self, pieces, offset)

    monkeypatch.setattr(DiskFile, "write", counted)
    for number in range(12, 40):
        assert store(backend, [number]) == [OK]
    assert sum(written) == 28 * 4 * 4096
    assert {path: path.stat().st_ino for path in segments(tmp_path)} == before
    backend.close()


def test_a_crash_in_the_middle_of_writing_over_loses_that_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, left = tmp_path / "store", tmp_path / "left"
    directory.mkdir()
    backend = full(directory)
    write = DiskFile.write

    def torn(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        write(self, pieces[:1], offset)  # the block, and nothing of the payload
        shutil.copytree(directory, left)
        write(self, pieces, offset)

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "write", torn)
        assert store(backend, [20]) == [OK]
    backend.close()
    after = opened(left)
    assert after.verify().damaged == ()
    assert kept(after) == {*range(1, N_RECORDS)}
    storage = Storage(FINGERPRINT, after)
    assert fetched(storage, PLACES[:N_RECORDS], SIZE) == [MISS] + [OK] * 11
    assert stored(storage, PLACES[20:21], SIZE) == [OK]
    assert fetched(storage, PLACES[20:21], SIZE) == [OK]
    assert not storage.counters.snapshot().get("get.corrupt")
    assert storage.close()


def test_another_process_finds_new_records_and_misses_those_written_over(tmp_path: Path) -> None:
    writer, reader = full(tmp_path), opened(tmp_path)
    assert kept(reader) == {*range(N_RECORDS)}
    assert store(writer, [20, 21]) == [OK] * 2
    told = [room(SIZE) for _ in range(4)]
    keys = [KEYS[number] for number in (0, 1, 20, 21)]
    assert list(reader.get_into(keys, told, 10.0)) == [MISS, MISS, OK, OK]
    for value, number in zip(told[2:], (20, 21)):
        assert value.payload == whole(number).payload
    assert store(reader, [30]) == [OK]
    assert list(writer.exists([KEYS[2], KEYS[30]])) == [False, True]
    for backend in (writer, reader):
        assert backend.verify().damaged == ()
        backend.close()


def test_records_of_many_that_another_process_writes_over_before_or_during_a_read_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, reader = full(tmp_path), opened(tmp_path)
    keys, read, meanwhile = KEYS[:N_RECORDS], DiskFile.read, [20]

    def overtaken(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        read(self, pieces, offset)
        if meanwhile:
            assert store(writer, [meanwhile.pop()]) == [OK]

    monkeypatch.setattr(DiskFile, "read", overtaken)
    assert list(reader.get_into(keys, [room(SIZE) for _ in keys], 10.0)) == [MISS] + [OK] * 11
    assert store(writer, [21]) == [OK]
    assert list(reader.get_into(keys, [room(SIZE) for _ in keys], 10.0)) == [MISS] * 2 + [OK] * 10
    for backend in (writer, reader):
        assert backend.verify().damaged == ()
        backend.close()


def test_a_read_of_many_keys_asks_for_all_of_their_stamps_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of the system lets another thread run, and then waits for its own turn."""
    backend, pread, calls = full(tmp_path), os.pread, list[int]()

    def counted(fd: int, nbytes: int, offset: int) -> bytes:
        calls.append(nbytes)
        return pread(fd, nbytes, offset)

    keys = KEYS[:N_RECORDS]
    monkeypatch.setattr(os, "pread", counted)
    assert {*backend.get_into(keys, [room(SIZE) for _ in keys], 10.0)} == {OK}
    assert len(calls) <= 2 * len(segments(tmp_path))  # a layout each, before and afterwards
    backend.close()


def damage(backend: FileBackend, numbers: Sequence[int]) -> None:
    """Set the blocks of records to zero."""
    for number in numbers:
        place = backend._catalog.entries[KEYS[number]]
        with place.segment.file.path.open("r+b") as file:
            os.pwrite(file.fileno(), bytes(4096), place.offset)


def clock(monkeypatch: pytest.MonkeyPatch, module: str, time_ns: Callable[[], int]) -> None:
    """Let a module of the store have this clock on the wall."""
    of_module = SimpleNamespace(time_ns=time_ns, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(f"kvgraft_file.{module}.time", of_module)


@pytest.mark.parametrize("layouts", ["any", "one"])
def test_a_store_with_damaged_blocks_holds_as_many_records_when_it_is_opened_again(
    layouts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if layouts == "one":
        alike = (now for now in count(time.time_ns()) if not SharedHints.layout_slot(now))
        clock(monkeypatch, "directory", lambda: next(alike))
    backend = full(tmp_path)
    there = list(range(N_RECORDS))
    for again in range(1, 5):
        damage(backend, there[again::3])
        backend.close()
        backend = opened(tmp_path)
        assert kept(backend) == {*there} - {*there[again::3]}
        there = [(there[0] + N_RECORDS + number) % len(KEYS) for number in range(N_RECORDS)]
        for number in there:
            assert store(backend, [number]) == [OK]
        assert kept(backend) == {*there}
        assert not backend.verify().damaged
    backend.close()


def test_smaller_records_in_a_damaged_place_are_found_and_kept_by_who_knew_the_place(
    tmp_path: Path,
) -> None:
    first = full(tmp_path)
    damage(first, [11, 5, 8])
    second = opened(tmp_path)
    content = memoryview(record(PLACES[30], 100))
    small = Value(content[:HEADER_NBYTES], content[HEADER_NBYTES:])
    assert second.set_from([KEYS[30], KEYS[31]], [small, whole(31)], 10.0) == [OK, OK]
    assert kept(second) == {*range(N_RECORDS), 30, 31} - {5, 8, 11}
    first.stats()  # looks for changes
    assert kept(first) >= {30, 31}
    assert store(first, [32]) == [OK]
    assert first.get_into([KEYS[30]], [room(100)], 10.0) == [OK]
    first.close()
    second.close()


def test_records_of_a_segment_that_another_process_changed_keep_their_order_of_use(
    tmp_path: Path,
) -> None:
    first = full(tmp_path)
    damage(first, [0])
    second = opened(tmp_path)
    assert store(second, [30]) == [OK]
    first.stats()  # looks for changes
    assert kept(first) == {*range(1, N_RECORDS), 30}
    assert store(first, [31]) == [OK]
    assert kept(first) == {*range(2, N_RECORDS), 30, 31}
    first.close()
    second.close()


def test_recency_outlives_a_restart_after_which_the_clock_was_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full(tmp_path).close()
    clock(monkeypatch, "shared_hints", lambda: time.time_ns() - 3600 * 10**9)
    backend = opened(tmp_path)
    assert store(backend, [20, 21]) == [OK] * 2
    backend.close()
    backend = opened(tmp_path)
    assert store(backend, [22]) == [OK]
    assert kept(backend) == {*range(3, N_RECORDS), 20, 21, 22}
    backend.close()


def test_a_record_used_by_another_process_is_not_the_next_one_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgraft_file.catalog.NOTED_NS", 0)
    writer, reader = full(tmp_path), opened(tmp_path)
    reader.touch([KEYS[0]])
    assert store(writer, [20, 21]) == [OK] * 2
    assert kept(writer) == {0, *range(3, N_RECORDS), 20, 21}
    for backend in (writer, reader):
        backend.close()


@pytest.mark.parametrize("hints", ["kept", "lost", "damaged"])
def test_recency_outlives_a_restart_as_far_as_it_was_written_down(
    tmp_path: Path, hints: str
) -> None:
    backend = full(tmp_path)
    backend.touch([KEYS[1], KEYS[0]])
    backend.close()
    if hints == "lost":
        (tmp_path / NAME).unlink()
    elif hints == "damaged":
        (tmp_path / NAME).write_bytes(os.urandom(1 << 20))
    again = opened(tmp_path)
    assert kept(again) == {*range(N_RECORDS)}
    assert store(again, [20, 21]) == [OK] * 2
    if hints == "kept":
        assert kept(again) == {0, 1, *range(4, N_RECORDS), 20, 21}
    else:
        assert {0, 20, 21} <= kept(again), "of a segment the last records go first"
    assert again.verify().damaged == ()
    again.close()


def test_blocks_that_another_process_still_writes_to_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = full(tmp_path)
    backend.close()
    backend = opened(tmp_path)
    files = [DiskFile(path, direct=False) for path in segments(tmp_path)]
    reuse = Segment.reuse.__func__  # type: ignore[attr-defined]

    def overtaken(cls: type[Segment], opener: object, old: Segment, *rest: int) -> Segment:
        (other,) = [file for file in files if file.inode == old.file.inode]
        other.mark(4096, 16384)  # it looked at the name just before that is gone
        made: Segment = reuse(cls, opener, old, *rest)
        assert made.file.inode != other.inode
        return made

    monkeypatch.setattr(Segment, "reuse", classmethod(overtaken))
    content = memoryview(bytes(2 * SIZE))
    told = backend.set_from([KEYS[50]], [Value(content[:HEADER_NBYTES], content)], 10.0)
    assert list(told) == [OK]
    assert any(file.is_gone for file in files)
    backend.close()
    for file in files:
        file.let_go()


def test_removing_late_neither_removes_nor_evicts_the_record_that_was_written_over_it(
    tmp_path: Path,
) -> None:
    writer, remover = full(tmp_path), opened(tmp_path)
    places = remover._catalog.take(KEYS[0])
    assert store(writer, [20]) == [OK]
    remover._remove_records(KEYS[0], places)
    remover._catalog.put_back(places)
    remover._writer._full_until = math.inf  # it does not look for changes
    assert store(remover, [21]) == [OK]
    assert SharedHints.slot(1, 4096) != SharedHints.slot(1, 8192)
    storage = Storage(FINGERPRINT, writer)
    assert fetched(storage, PLACES[20:21], SIZE) == [OK]
    assert storage.close()
    remover.close()


def test_a_size_that_comes_later_gets_segments_of_the_one_not_used_any_more(
    tmp_path: Path,
) -> None:
    backend = full(tmp_path)
    large = [memoryview(bytes(2 * SIZE)) for _ in range(30)]
    header = memoryview(bytearray(HEADER_NBYTES))
    backend._writer._full_until = 0.0
    for number, content in enumerate(large, 12):
        assert list(backend.set_from([KEYS[number]], [Value(header, content)], 10.0)) == [OK]
        backend._writer._full_until = 0.0  # a second has passed
    assert kept(backend) & {*range(N_RECORDS)} == set()
    assert len(kept(backend)) == 8
    backend.close()


def failing_at(
    monkeypatch: pytest.MonkeyPatch, offsets: Mapping[str, Sequence[int]]
) -> list[tuple[str, int]]:
    """Have the disk not write some blocks, by the file's name; the writes that it refused."""
    write, refused = DiskFile.write, list[tuple[str, int]]()

    def failing(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        end = offset + sum(map(len, pieces))
        if any(offset <= each < end for each in offsets.get(self.path.name, ())):
            refused.append((self.path.name, offset))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, pieces, offset)

    monkeypatch.setattr(DiskFile, "write", failing)
    return refused


def place_of(backend: FileBackend, number: int) -> tuple[str, int]:
    place = backend._catalog.entries[KEYS[number]]
    return place.segment.file.path.name, place.offset


def test_a_place_that_cannot_be_written_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = full(tmp_path)
    name, offset = place_of(backend, 0)
    storage = Storage(FINGERPRINT, backend)
    refused = failing_at(monkeypatch, {name: [offset + 8192]})
    assert stored(storage, PLACES[20:21], SIZE) == [Status.DOWN]
    for number in range(21, 21 + N_RECORDS - 1):
        assert stored(storage, PLACES[number : number + 1], SIZE) == [OK]
    assert kept(backend) == {*range(21, 21 + N_RECORDS - 1)}
    assert refused == [(name, offset)]
    assert stored(storage, PLACES[40:41], SIZE) == [Status.DOWN], "all others were used since"
    assert stored(storage, PLACES[41:42], SIZE) == [OK]
    monkeypatch.undo()
    assert backend.verify().damaged == ()
    assert storage.close()


def test_neighbours_of_a_place_that_cannot_be_written_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = full(tmp_path)
    name, offset = place_of(backend, 1)
    assert [place_of(backend, number)[0] for number in (0, 2)] == [name] * 2
    failing_at(monkeypatch, {name: [offset]})
    assert store(backend, [20, 21, 22]) == [OK, Status.DOWN, OK]
    assert kept(backend) == {*range(3, N_RECORDS), 20, 22}
    assert list(backend.get_into([KEYS[22]], [room(SIZE)], 10.0)) == [OK]
    monkeypatch.undo()
    assert backend.verify().damaged == ()
    backend.close()


def test_a_disk_that_writes_nothing_costs_few_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = full(tmp_path)
    everywhere = {path.name: range(0, SEGMENT, 4096) for path in segments(tmp_path)}
    with monkeypatch.context() as patch:
        failing_at(patch, everywhere)
        for number in range(20, 30):
            with pytest.raises(OSError, match="Input/output error"):
                store(backend, [number])
        assert kept(backend) == {*range(3, N_RECORDS)}
    assert store(backend, [31, 32, 33]) == [OK] * 3
    assert kept(backend) >= {31, 32, 33}
    assert backend.verify().damaged == ()
    backend.close()
