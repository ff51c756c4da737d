"""The room of damaged blocks, which is written over: errors of the disk, and processes beside."""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft_file import FileBackend
from kvgraft_file.catalog import Entry
from kvgraft_file.disk import DiskFile
from kvgraft_file.segment import Segment
from kvgraft_storage import Status, Value
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_testing.storage.traffic import record, room
from tests.commands import ROOT, run_forked

from .store import segments
from .test_unfinished import unreadable
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
    whole,
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


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_hole_that_the_disk_does_not_take_is_left_alone_until_the_store_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    holed(tmp_path)
    backend = opened(tmp_path)
    verbatim, tried = getattr(DiskFile, verb), []
    bad = backend._catalog.damaged.copy().popitem()[0]
    (hole,) = bad.holes

    def failing(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        if self is bad.file and hole[0] <= offset < hole[1]:
            tried.append(offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        verbatim(self, pieces, offset)

    with monkeypatch.context() as patch:
        patch.setattr(DiskFile, verb, failing)
        assert store(backend, [20, 21, 22]) == [OK] * 3
    assert len(tried) == 1
    assert len(kept(backend)) == N_RECORDS - 1
    backend.close()
    backend = opened(tmp_path)
    before = kept(backend)
    assert store(backend, [30]) == [OK]
    assert kept(backend) == before | {30}
    expect_sound(backend)


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


def test_a_segment_whose_places_changed_is_read_anew_at_once_after_a_failed_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgraft_file.segment.RETRY_BACKOFF", 1e9)
    holed(tmp_path)
    with unreadable(segments(tmp_path)[1:2], {4096 + 2 * 4 * 4096}):
        first = opened(tmp_path)
    second = opened(tmp_path)
    assert kept(first) == LEFT - {5}
    assert store(second, [20]) == [OK], "in the hole before the record that was not read"
    first.stats()  # looks for changes
    assert kept(first) == LEFT | {20}
    expect_sound(first, second)


def test_a_process_that_looks_while_a_place_is_made_finds_the_record_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holed(tmp_path)
    backend, other = opened(tmp_path), opened(tmp_path)
    make = Segment.make_place

    def watched(self: Segment, offset: int, nbytes: int) -> None:
        other.stats()  # looks for changes
        make(self, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "make_place", watched)
        assert store(backend, [20]) == [OK]
    other.stats()
    assert holds(other, 20, SIZE) is OK
    expect_sound(backend, other)


MAKE_A_PLACE_AND_DIE = """
import os, sys
from pathlib import Path
from plugins.file.tests.test_holes import KEYS, large
from plugins.file.tests.test_written_over import opened
from kvgraft_file.segment import Segment

make = Segment.make_place

def last(self, offset, nbytes):
    make(self, offset, nbytes)
    os._exit(9)

Segment.make_place = last
opened(Path(sys.argv[1])).set_from([KEYS[30]], [large(30)], 10.0)
"""


def test_after_a_crash_behind_a_new_place_nobody_writes_over_the_places_it_covers(
    tmp_path: Path,
) -> None:
    first = full(tmp_path)
    damage(first, [4, 5])
    died = run_forked("-c", MAKE_A_PLACE_AND_DIE, tmp_path, cwd=ROOT)
    assert died.returncode == 9, died.stderr
    first.touch([KEYS[number] for number in range(N_RECORDS) if number != 5])
    first._writer._full_until = math.inf  # it does not look for changes
    assert store(first, [40]) == [OK]
    second = opened(tmp_path)
    assert holds(second, 40, SIZE) is OK, "it is where others do not look for records"
    expect_sound(first, second)


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


def number_of(place: Entry) -> int:
    return KEYS.index(place.key)


VERBS = ["store", "store", "store", "damage", "damage", "remove", "reopen", "look", "look no more"]
CALLS = st.lists(
    st.tuples(st.sampled_from(VERBS), st.integers(0, 1), st.integers(12, 41)),
    min_size=10,
    max_size=60,
)


@given(CALLS)
@settings(max_examples=8, deadline=None)
def test_two_processes_and_damage_at_any_time_leave_no_record_half_covered(
    calls: list[tuple[str, int, int]],
) -> None:
    """Every third record is a large one."""
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        stores = [full(directory), opened(directory)]
        last: tuple[FileBackend, int] | None = None
        for verb, which, number in calls:
            backend = stores[which]
            if verb == "store":
                value = whole(number) if number % 3 else large(number)
                fresh = number not in kept(backend)
                reclaimed = backend.counters.snapshot().get("reclaimed")
                assert list(backend.set_from([KEYS[number]], [value], 10.0)) == [OK]
                if last and reclaimed == backend.counters.snapshot().get("reclaimed"):
                    assert holds(*last, SIZE if last[1] % 3 else 2 * SIZE) is OK, "the newest one"
                last = (backend, number) if fresh else None
            elif verb == "damage":
                known = [*backend._catalog.segments.values()]
                segment = known[number % len(known)]
                with suppress(FileNotFoundError):  # the other one has reclaimed it
                    damage(backend, [*map(number_of, backend._catalog.of(segment))][:2])
                last = None
            elif verb == "remove":
                backend.remove([KEYS[number]])
                last = last if last and last[1] != number else None
            elif verb == "reopen":
                backend.close()
                last, stores[which] = None, opened(directory)
            elif verb == "look":
                backend._writer._full_until = 0.0
                backend.stats()
            elif verb == "look no more":
                backend._writer._full_until = math.inf
        stores.append(opened(directory))
        for backend in stores:
            backend.stats()
            for segment in backend._catalog.segments.values():
                parts = [(each.offset, each.offset + each.size) for each in segment.places.values()]
                parts = sorted(parts + segment.holes)
                assert all(one[1] <= next_one[0] for one, next_one in pairwise(parts))
        expect_sound(*stores)
