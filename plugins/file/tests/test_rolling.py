"""A segment is full while a write is on its way to it: the next one begins, it is sealed later."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvgraft.errors import ConfigError
from kvgraft_file import FileBackend
from kvgraft_file.disk import DiskFile
from kvgraft_file.segment import Segment
from kvgraft_file.writer import Writer
from kvgraft_storage import Status, Value
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_testing.storage.traffic import addresses, payload, record, room

from .store import open_store, segments

OK, MISS = Status.OK, Status.MISS
SIZE = 9000
SEGMENT = 1 << 16
A_SEGMENT = 3
"""Records of this size that fit into one."""

PLACES = addresses(60)
LONGEST_S = 30.0


def whole(number: int) -> Value:
    content = record(PLACES[number], SIZE)
    return Value(memoryview(content)[:HEADER_NBYTES], memoryview(content)[HEADER_NBYTES:])


def keys(numbers: Sequence[int]) -> list[bytes]:
    return [PLACES[number].key for number in numbers]


def store(backend: FileBackend, numbers: Sequence[int], deadline_s: float = 10.0) -> list[Status]:
    told = backend.set_from(keys(numbers), [whole(number) for number in numbers], deadline_s)
    return list(told)


def fetch(backend: FileBackend, numbers: Sequence[int]) -> list[Status]:
    rooms = [room(SIZE) for _ in numbers]
    told = list(backend.get_into(keys(numbers), rooms, 10.0))
    for number, value, status in zip(numbers, rooms, told):
        assert status is not OK or value.payload == payload(PLACES[number], SIZE)
    return told


class HeldWrites:
    """A write of one thread that does not end before it is told to.

    Attributes:
        told: the result of its `set_from`.
    """

    def __init__(self, backend: FileBackend, numbers: Sequence[int]) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()
        self.told: list[Status] | OSError | None = None
        self.error: OSError | None = None
        self._thread = threading.Thread(target=self._run, args=(backend, numbers))

    def _run(self, backend: FileBackend, numbers: Sequence[int]) -> None:
        try:
            self.told = store(backend, numbers, LONGEST_S)
        except OSError as error:
            self.told = error

    def write(self, given: Callable[..., None], *arguments: object) -> None:
        if threading.current_thread() is self._thread and len(arguments) == 3:
            self.inside.set()
            assert self.go_on.wait(LONGEST_S)
            if self.error is not None:
                raise self.error
        given(*arguments)

    def begin(self) -> None:
        self._thread.start()
        assert self.inside.wait(LONGEST_S)

    def end(self, error: OSError | None = None) -> None:
        self.error = error
        self.go_on.set()
        self._thread.join(LONGEST_S)
        assert not self._thread.is_alive()


@contextmanager
def held(backend: FileBackend, numbers: Sequence[int]) -> Iterator[HeldWrites]:
    """A write that has begun, in a thread of its own; it ends with the block at the latest."""
    one = HeldWrites(backend, numbers)
    given = DiskFile.write

    def write(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        one.write(given, self, pieces, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "write", write)
        store(backend, [59])  # the first segment is there
        one.begin()
        try:
            yield one
        finally:
            one.end(one.error)


def is_sealed(path: Path) -> bool:
    """Whether it was cut, and nobody has it locked."""
    file = DiskFile(path, direct=False)
    try:
        return path.stat().st_size < SEGMENT and file.try_lock()
    finally:
        file.let_go()


def test_the_next_segment_begins_while_a_write_to_the_last_one_is_on_its_way(
    tmp_path: Path,
) -> None:
    mine, other = open_store(tmp_path, 8 * SEGMENT, SEGMENT), open_store(tmp_path, 8 * SEGMENT)
    with held(mine, [0]) as slow:
        assert store(mine, range(1, 9)) == [OK] * 8
        assert fetch(mine, range(9)) == [MISS] + [OK] * 8
        assert fetch(other, range(9)) == [MISS] * 2 + [OK] * 7, "1 is behind 0 in its segment"
        first, second, *_ = segments(tmp_path)
        assert first.stat().st_size == SEGMENT, "nobody takes it for a sealed one"
        assert not is_sealed(first)
        assert is_sealed(second)
        slow.end()
        assert slow.told == [OK]
        assert is_sealed(first)
    assert fetch(mine, range(9)) == fetch(other, range(9)) == [OK] * 9
    for backend in (mine, other):
        assert backend.verify().damaged == ()
        backend.close()
    again = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    assert fetch(again, range(9)) == [OK] * 9
    again.close()


def test_a_segment_with_a_write_on_its_way_is_not_reclaimed(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 3 * SEGMENT, SEGMENT)
    with held(backend, [0]) as slow:
        for first in range(1, 40, A_SEGMENT):
            numbers = range(first, first + A_SEGMENT)
            assert store(backend, numbers) == [OK] * A_SEGMENT
        assert backend.stats().nbytes <= 3 * SEGMENT
        slow.end()
        assert slow.told == [OK]
    assert fetch(backend, [0, 59]) == [OK, OK]
    assert backend.verify().damaged == ()
    for first in range(40, 58, A_SEGMENT):
        assert store(backend, range(first, first + A_SEGMENT)) == [OK] * A_SEGMENT
    store(backend, range(1, 30))
    assert fetch(backend, [0]) == [MISS], "it is evicted like any other now"
    backend.close()


def test_where_every_segment_has_a_write_on_its_way_one_waits_for_it(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 2 * SEGMENT, SEGMENT)
    with held(backend, [0]) as first:
        assert store(backend, [1, 2]) == [OK, OK]
        with held(backend, [3]) as second:
            third = threading.Timer(0.2, first.end)
            third.start()
            assert store(backend, range(4, 4 + 2 * A_SEGMENT)) == [OK] * 2 * A_SEGMENT
            third.join()
            second.end()
            assert (first.told, second.told) == ([OK], [OK])
    assert backend.verify().damaged == ()
    backend.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_write_that_fails_late_leaves_its_segment_sealed(tmp_path: Path, code: int) -> None:
    backend = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    with held(backend, [0]) as slow:
        assert store(backend, range(1, 6)) == [OK] * 5
        slow.end(OSError(code, os.strerror(code)))
    if code == errno.ENOSPC:
        assert slow.told == [Status.FULL]
    else:
        assert isinstance(slow.told, OSError)
    assert is_sealed(segments(tmp_path)[0])
    assert fetch(backend, [59, *range(6)]) == [OK, MISS, *[OK] * 5]
    backend.close()
    again = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    assert fetch(again, [59, *range(6)]) == [OK, MISS, *[OK] * 5]
    again.close()


@pytest.mark.parametrize("n_more", [0, 5], ids=["the active one", "one that was left"])
def test_closing_waits_for_the_writes_to_a_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_more: int
) -> None:
    monkeypatch.setattr("kvgraft_file.store.LOCK_S", 1000.0)
    backend = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    with held(backend, [0]) as slow:
        assert store(backend, range(1, 1 + n_more)) == [OK] * n_more
        closing = threading.Thread(target=backend.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        slow.end()
        closing.join(LONGEST_S)
        assert not closing.is_alive()
        assert slow.told == [OK]
    assert all(is_sealed(path) for path in segments(tmp_path))
    again = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    assert fetch(again, range(1 + n_more)) == [OK] * (1 + n_more)
    again.close()


def test_records_written_to_a_segment_that_was_left_and_cleared_are_gone(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    with held(backend, [0]) as slow:
        assert store(backend, range(1, 6)) == [OK] * 5
        backend.clear()
        assert segments(tmp_path) == []
        assert store(backend, range(6, 8)) == [OK] * 2
        slow.end()
        assert slow.told == [OK]
    assert fetch(backend, range(8)) == [MISS] * 6 + [OK] * 2
    assert len(segments(tmp_path)) == 1
    backend.close()


def test_a_segment_is_sealed_when_the_last_of_its_writes_has_ended(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    with held(backend, [0]) as one, held(backend, [1]) as two:
        assert store(backend, range(2, 7)) == [OK] * 5
        first = segments(tmp_path)[0]
        one.end()
        assert not is_sealed(first)
        two.end()
        assert is_sealed(first)
        assert (one.told, two.told) == ([OK], [OK])
    assert fetch(backend, range(7)) == [OK] * 7
    backend.close()


def test_a_write_that_waits_for_room_goes_on_when_the_store_is_cleared(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 2 * SEGMENT, SEGMENT)
    with held(backend, [0]) as first:
        assert store(backend, [1, 2]) == [OK, OK]
        with held(backend, [3]) as second:
            clearing = threading.Timer(0.2, backend.clear)
            clearing.start()
            assert store(backend, range(4, 10), LONGEST_S) == [OK] * 6
            clearing.join()
            for slow in (first, second):
                slow.end()
                assert slow.told == [OK]
    backend.close()


def test_a_write_that_waits_for_room_gives_up_at_the_deadline(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 2 * SEGMENT, SEGMENT)
    with held(backend, [0]), held(backend, [3]):
        assert store(backend, [1]) == [OK]
        with held(backend, [4]):
            told = store(backend, range(5, 15), 0.3)
            assert told == [Status.TIMEOUT] * 10
    backend.close()


def test_a_write_that_waits_for_room_is_stored_or_told_of_the_stores_close(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 2 * SEGMENT, SEGMENT)
    told: list[list[Status] | str] = []

    def wait() -> None:
        try:
            told.append(store(backend, range(4, 10), LONGEST_S))
        except ConfigError as error:
            told.append(str(error))

    with held(backend, [0]) as first:
        assert store(backend, [1, 2]) == [OK, OK]
        with held(backend, [3]) as second:
            both = [threading.Thread(target=wait), threading.Thread(target=backend.close)]
            for thread in both:
                thread.start()
            for slow in (first, second):
                slow.end()
            for thread in both:
                thread.join(LONGEST_S)
    assert told == [[OK] * 6] or "was closed; open it again" in str(told)
    assert all(is_sealed(path) for path in segments(tmp_path))


def test_two_threads_may_close_a_store(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    raised: list[BaseException] = []

    def close() -> None:
        try:
            backend.close()
        except BaseException as error:  # noqa: BLE001 - shown below
            raised.append(error)

    with held(backend, [0]) as slow:
        closing = [threading.Thread(target=close) for _ in range(2)]
        for thread in closing:
            thread.start()
        slow.end()
        for thread in closing:
            thread.join(LONGEST_S)
    assert raised == []
    assert slow.told == [OK]


def open_segments() -> int:
    """Descriptors of segments in this process."""
    found = 0
    for each in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += ".kvseg" in str(each.readlink())
    return found


def test_a_new_segment_is_not_opened_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = open_store(tmp_path, 3 * SEGMENT, SEGMENT)
    given = Segment._begin.__func__  # type: ignore[attr-defined]

    def begin(cls: type[Segment], *arguments: object) -> Segment:
        made: Segment = given(cls, *arguments)
        backend.exists([bytes(32)])  # as another thread may at any time
        return made

    before = open_segments()
    monkeypatch.setattr(Segment, "_begin", classmethod(begin))
    for first in range(0, 57, A_SEGMENT):
        assert store(backend, range(first, first + A_SEGMENT)) == [OK] * A_SEGMENT
        assert open_segments() <= before + 3
    backend.close()
    assert open_segments() == before


def test_a_segment_that_cannot_be_cut_is_let_go_of_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_store(tmp_path, 3 * SEGMENT, SEGMENT)
    before = open_segments()
    assert store(backend, [0]) == [OK]

    def truncate(fd: int, nbytes: int) -> None:
        if nbytes < SEGMENT:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        given(fd, nbytes)

    given = os.ftruncate
    with monkeypatch.context() as patch:
        patch.setattr(os, "ftruncate", truncate)
        for first in range(1, 58, A_SEGMENT):
            assert store(backend, range(first, first + A_SEGMENT)) == [OK] * A_SEGMENT
        assert sum(path.stat().st_size for path in segments(tmp_path)) <= 3 * SEGMENT
        assert backend.verify().damaged == (), "a segment that was not cut is not damaged"
        backend.close()
    assert open_segments() == before
    again = open_store(tmp_path, 3 * SEGMENT, SEGMENT)
    assert fetch(again, range(55, 58)) == [OK] * 3
    assert all(is_sealed(path) for path in segments(tmp_path))
    assert again.verify().damaged == ()
    again.close()


def test_a_file_that_was_never_written_to_is_no_segment(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 3 * SEGMENT, SEGMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "_append", lambda *_: None)
        store(backend, [0])
    assert len(segments(tmp_path)) == 1
    backend.close()
    assert segments(tmp_path) == []


def test_a_key_given_twice_has_one_fate(tmp_path: Path) -> None:
    backend = open_store(tmp_path, 3 * SEGMENT, SEGMENT)

    def write(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        if len(pieces) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        given(self, pieces, offset)

    given = DiskFile.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskFile, "write", write)
        assert store(backend, [0, 1, 0]) == [Status.FULL] * 3
    assert store(backend, [0, 1, 0]) == [OK] * 3
    assert backend.stats().n_records == 2
    backend.close()


def test_a_close_that_takes_too_long_leaves_nothing_locked_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvgraft_file.store.LOCK_S", 0.1)
    before = open_segments()
    backend = open_store(tmp_path, 8 * SEGMENT, SEGMENT)
    with held(backend, [0]) as slow:
        with pytest.raises(TimeoutError):
            backend.close()
        slow.end()
        assert slow.told == [OK]
    assert all(is_sealed(path) for path in segments(tmp_path))
    assert open_segments() == before
