"""The room of damaged blocks, which is written over: errors of the disk, and processes beside."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvgraft.storage import Status, Value
from kvgraft.storage.payload import HEADER_NBYTES
from kvgraft.testing.storage.traffic import record, room
from kvgraft_file import FileBackend
from kvgraft_file.disk import DiskFile
from kvgraft_file.segment import Segment

from .test_written_over import (
    KEYS,
    N_RECORDS,
    PLACES,
    SIZE,
    damage,
    full,
    kept,
    opened,
    store,
)

OK, MISS = Status.OK, Status.MISS
LEFT = {*range(N_RECORDS)} - {4, 8}


def holed(directory: Path) -> None:
    """A store whose records 4 and 8 are damaged, in segments of their own."""
    backend = full(directory)
    damage(backend, [4, 8])
    backend.close()


def stale(*_: object, **__: object) -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("fails", ["is_gone", "next_record", "make_place"])
def test_an_unusual_error_leaves_a_hole_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    holed(tmp_path)
    backend, other = opened(tmp_path), opened(tmp_path)
    places = sum(len(each.places) for each in backend._catalog.segments.values())
    with monkeypatch.context() as patch:
        if fails == "is_gone":
            patch.setattr(DiskFile, fails, property(stale))
        else:
            patch.setattr(Segment, fails, stale)
        with pytest.raises(OSError, match=r"[Ss]tale"):
            backend._writer._take(4 * 4096)
    assert sum(len(each.places) for each in backend._catalog.segments.values()) == places
    assert {each.file._users for each in backend._catalog.segments.values()} == {0}
    assert store(other, [20]) == [OK], "where the first one tried to"
    assert kept(other) == LEFT | {20}
    backend.stats()  # looks for changes
    assert store(backend, [21]) == [OK]
    assert kept(backend) == LEFT | {20, 21}
    for each in (backend, other):
        assert each.verify().damaged == ()
        each.close()


def test_a_segment_whose_holes_are_filled_is_not_looked_at_again(tmp_path: Path) -> None:
    holed(tmp_path)
    backend = opened(tmp_path)
    numbers = [each.header.number for each in backend._catalog.damaged]
    assert numbers == sorted(numbers)
    assert len(numbers) == 2
    assert store(backend, [20]) == [OK]
    assert [each.header.number for each in backend._catalog.damaged] == numbers[1:]
    assert store(backend, [21]) == [OK]
    assert not backend._catalog.damaged
    backend.close()


@pytest.mark.parametrize("there", ["a hole", "a record"])
def test_room_that_cannot_be_written_is_left_alone_until_the_store_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    if there == "a hole":
        holed(tmp_path)
    else:
        full(tmp_path).close()
    backend = opened(tmp_path)
    write, tried = DiskFile.write, []

    def bad(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        tried.append((self.inode, offset))
        if tried[0] == (self.inode, offset):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(self, pieces, offset)

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "write", bad)
        for number in range(20, 23):
            try:
                assert store(backend, [number]) == [OK]
            except OSError:
                assert number == 20, "it was tried again"
    assert kept(backend) >= {21, 22}
    backend.close()
    backend = opened(tmp_path)
    assert store(backend, [30]) == [OK]
    assert len(kept(backend)) == N_RECORDS
    assert list(backend.exists([KEYS[30]])) == [True]
    backend.close()


def large(number: int) -> Value:
    """A record of the size of one and a half others."""
    content = memoryview(record(PLACES[number], SIZE * 2))
    return Value(content[:HEADER_NBYTES], content[HEADER_NBYTES:])


def holds(backend: FileBackend, number: int, size: int) -> Status:
    """The outcome of reading a record; a wrong byte fails."""
    value = room(size)
    (told,) = backend.get_into([KEYS[number]], [value], 10.0)
    if told is OK:
        assert bytes(value.header) + bytes(value.payload) == record(PLACES[number], size)
    return told


def beside(directory: Path) -> tuple[FileBackend, FileBackend]:
    """Two stores; damage hides the records 4 and 5, side by side, from the second one alone."""
    first = full(directory)
    damage(first, [4, 5])
    return first, opened(directory)


def expect_sound(*backends: FileBackend) -> None:
    for backend in backends:
        assert [each for each in backend.verify().damaged if each.key] == []
        backend.close()


def test_a_record_over_two_damaged_ones_outlives_a_process_that_knows_their_places(
    tmp_path: Path,
) -> None:
    first, second = beside(tmp_path)
    assert list(second.set_from([KEYS[30]], [large(30)], 10.0)) == [OK]
    assert store(first, range(40, 50)) == [OK] * 10
    assert kept(first) & {*range(N_RECORDS)} == set()
    for backend in (second, first):
        assert holds(backend, 30, 2 * SIZE) is OK
    expect_sound(first, second, opened(tmp_path))


@pytest.mark.parametrize("verb", ["read", "remove"])
def test_a_place_that_another_record_covers_is_a_miss_and_is_not_removed(
    tmp_path: Path, verb: str
) -> None:
    first, second = beside(tmp_path)
    assert list(second.set_from([KEYS[30]], [large(30)], 10.0)) == [OK]
    if verb == "read":
        assert holds(first, 5, SIZE) is MISS
    else:
        assert list(first.remove([KEYS[5]])) == [OK], "as far as it knew"
    assert holds(second, 30, 2 * SIZE) is OK
    expect_sound(first, second, opened(tmp_path))


def test_a_record_stored_in_what_is_a_hole_to_another_process_is_kept_by_it(
    tmp_path: Path,
) -> None:
    first, second = beside(tmp_path)
    first.touch([KEYS[number] for number in range(N_RECORDS) if number != 5])
    assert store(first, [40]) == [OK], "over the record 5"
    assert list(second.set_from([KEYS[30]], [large(30)], 10.0)) == [OK]
    for backend in (first, second):
        assert holds(backend, 40, SIZE) is OK
        assert holds(backend, 30, 2 * SIZE) is OK
    expect_sound(first, second, opened(tmp_path))


def test_processes_that_know_one_hole_do_not_both_take_it(tmp_path: Path) -> None:
    holed(tmp_path)
    first, second = opened(tmp_path), opened(tmp_path)
    assert store(second, [20]) == [OK]
    first._writer._full_until = math.inf  # it does not look for changes
    assert store(first, [21]) == [OK]
    for backend in (first, second):
        assert holds(backend, 20, SIZE) is OK
        assert holds(backend, 21, SIZE) is OK
    assert kept(first) == LEFT | {20, 21}
    expect_sound(first, second)


def test_a_crash_while_a_hole_is_written_and_another_process_looks_loses_that_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, left = tmp_path / "store", tmp_path / "left"
    directory.mkdir()
    holed(directory)
    backend, other = opened(directory), opened(directory)
    write = DiskFile.write

    def torn(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        if len(pieces) > 1:
            write(self, pieces[:1], offset)  # the block, and nothing of the payload
            other.stats()  # looks for changes
            shutil.copytree(directory, left)
        write(self, pieces, offset)

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, "write", torn)
        assert store(backend, [20]) == [OK]
    other.stats()
    assert holds(other, 20, SIZE) is OK
    expect_sound(backend, other)
    after = opened(left)
    assert 20 not in kept(after)
    assert store(after, [21]) == [OK]
    assert kept(after) == LEFT | {21}
    expect_sound(after)
