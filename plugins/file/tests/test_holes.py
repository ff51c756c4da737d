"""The room of damaged blocks, which is written over: errors of the disk, and processes beside."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvgraft.storage import Status
from kvgraft_file.disk import DiskFile
from kvgraft_file.segment import Segment

from .test_written_over import KEYS, N_RECORDS, damage, full, kept, opened, store

OK = Status.OK
LEFT = {*range(N_RECORDS)} - {4, 8}


def holed(directory: Path) -> None:
    """A store whose records 4 and 8 are damaged, in segments of their own."""
    backend = full(directory)
    damage(backend, [4, 8])
    backend.close()


def stale(*_: object, **__: object) -> None:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


@pytest.mark.parametrize("fails", ["the name", "the block"])
def test_an_unusual_error_leaves_a_hole_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    holed(tmp_path)
    backend, other = opened(tmp_path), opened(tmp_path)
    places = sum(len(each.places) for each in backend._catalog.segments.values())
    with monkeypatch.context() as patch:
        if fails == "the name":
            patch.setattr(DiskFile, "is_gone", property(stale))
        else:
            patch.setattr(Segment, "read", stale)
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
