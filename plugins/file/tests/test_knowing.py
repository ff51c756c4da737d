"""Presence and events of a directory that several openers use; parts that need no copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgraft_file import FileBackend, FileOptions
from kvgraft_file.record import Place, Record
from kvgraft_file.transfer import Incoming, outgoing
from kvgraft_storage import (
    Change,
    EventLog,
    ScatteredValue,
    Status,
    Storage,
    StoreEvent,
    aligned,
)
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, room, settled, stored

SIZE = 6000
OK = Status.OK


def opened(directory: Path, now: list[float]) -> FileBackend:
    options = FileOptions(capacity=256 << 10, segment=64 << 10, refresh_s=0.5)
    return FileBackend(directory, options, lambda: now[0])


def test_absence_is_only_hinted_while_the_directory_was_just_looked_at(tmp_path: Path) -> None:
    now = [0.0]
    one, other = opened(tmp_path, now), opened(tmp_path, now)
    places = addresses(2)
    keys = [place.key for place in places]
    storage = Storage(FINGERPRINT, one)
    assert stored(storage, places[:1], SIZE) == [OK]
    assert one.probably_has(keys) == [True, False]
    assert other.probably_has(keys) == [False, False], "half a second may pass"
    now[0] += 0.5
    assert one.probably_has(keys) == [True, None]
    assert other.probably_has(keys) == [None, None]
    assert other.exists(keys) == [True, False]
    assert other.probably_has(keys) == [True, False]
    assert storage.close()
    other.close()


def test_events_tell_of_other_openers_and_of_nothing_at_the_end(tmp_path: Path) -> None:
    now = [0.0]
    one, other = opened(tmp_path, now), opened(tmp_path, now)
    events = EventLog()
    other.observe(events)
    places = addresses(80)
    keys = [place.key for place in places]
    storage = Storage(FINGERPRINT, one)
    known: set[bytes] = set()

    def look() -> None:
        now[0] += 1
        there = {key for key, hint in zip(keys, other.exists(keys)) if hint}
        for change, key in events.take():
            if change is Change.STORED:
                assert key not in known
                known.add(key)
            else:
                assert change in (Change.EVICTED, Change.REMOVED)
                known.remove(key)
        assert known == there

    for first in range(0, 80, 8):
        assert stored(storage, places[first : first + 8], SIZE) == [OK] * 8
        look()
    assert 0 < len(known) < 40, "some were evicted"
    gone = next(place for place in places if place.key in known)
    settled(storage.remove([gone]))
    other.get_into([gone.key], [room(SIZE)], 1.0)
    look()
    assert gone.key not in known
    assert storage.close()
    other.close()
    assert events.take() == []


def test_clearing_is_one_event(tmp_path: Path) -> None:
    store = opened(tmp_path, [0.0])
    storage = Storage(FINGERPRINT, store)
    events = storage.events()
    assert stored(storage, addresses(3), SIZE) == [OK] * 3
    settled(storage.clear())
    assert events.take() == [StoreEvent(Change.CLEARED)]
    assert storage.close()


@pytest.mark.parametrize(
    ("lengths", "n_copies"),
    [
        ((4096, 8192), 0),
        ((4096, 8192, 100), 1),  # the end of a payload is padded to a block
        ((100, 4096), 1),
        ((100, 3996, 4096), 1),  # a block of two parts, then one as it is
        ((4096, 1000, 3096, 4096), 1),
    ],
)
def test_whole_aligned_blocks_are_read_and_written_where_they_are(
    lengths: tuple[int, ...], n_copies: int
) -> None:
    parts = [aligned(length)[:length] for length in lengths]
    header = memoryview(bytearray(256))
    value = ScatteredValue.of(header, parts)
    record = Record(bytes(32), sum(lengths), True, bytes(256))
    written = outgoing(Place(bytes(16), 0), [record], [value.parts])
    (incoming,) = Incoming.of([value])
    for pieces in (written, incoming.pieces):
        own = {id(part.obj) for part in parts}
        assert sum(map(len, pieces)) == record.size
        assert sum(id(piece.obj) not in own for piece in pieces) == 1 + n_copies
