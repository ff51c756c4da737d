"""Segments edited at random: a store opens, gives stored data or a miss, and goes on (S9)."""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import xxhash

from kvgraft_file import FileBackend
from kvgraft_file.disk import DiskFile
from kvgraft_file.record import (
    MAX_SEGMENT_NBYTES,
    Place,
    Record,
    SegmentHeader,
    encode_record,
    encode_segment,
)
from kvgraft_storage import Status, Value
from kvgraft_storage.payload import HEADER_NBYTES, check
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, payload, record, room

from .store import open_store, segments

CAPACITY, SEGMENT = 1 << 20, 1 << 16
SIZES = (100, 5000, 9000, 4096, 0, 12000)
PLACES = addresses(len(SIZES) + 2)
NEW, NEW_SIZE = PLACES[-1], 7000
BLOCK = 4096
LONGEST_RUN = 16 << 20
MOST_READ = 512 << 20

EXTREMES: tuple[int, ...] = (0, 1, 2, BLOCK - 1, BLOCK, BLOCK + 1)
EXTREMES += (SEGMENT - BLOCK, SEGMENT, SEGMENT + BLOCK)
EXTREMES += tuple(
    2**power + shift for power in (16, 31, 32, 40, 62, 63) for shift in (-1, 0, BLOCK)
)
EXTREMES += (2**64 - 1, 2**64 - BLOCK, MAX_SEGMENT_NBYTES, MAX_SEGMENT_NBYTES - 2 * BLOCK)
LENGTHS: tuple[int, ...] = (0, 1, BLOCK, BLOCK + 1, 3 * BLOCK)
LENGTHS += (SEGMENT - BLOCK, SEGMENT, SEGMENT + 1, 2 * SEGMENT)
LENGTHS += (1 << 30, MAX_SEGMENT_NBYTES, 64 << 30)


class Target:
    """A segment's file, and the data in the store to copy from."""

    def __init__(self, path: Path, chance: random.Random, others: Sequence[Path]) -> None:
        self.path = path
        self.chance = chance
        self.others = others
        self.content = bytearray(path.read_bytes())
        self.length: int | None = None

    def block(self) -> int:
        """Where some block begins."""
        return self.chance.randrange(max(1, len(self.content) // BLOCK)) * BLOCK

    def record(self) -> int:
        """Where a record begins."""
        found = [
            offset
            for offset in range(BLOCK, len(self.content), BLOCK)
            if self.content[offset : offset + 5] == b"KVGRe"
        ]
        return self.chance.choice(found or [0])

    def number(self) -> int:
        if self.chance.random() < 0.3:
            return self.chance.getrandbits(64)
        return self.chance.choice(EXTREMES) % 2**64

    def seal(self, offset: int, size: int) -> None:
        """Give a block, or a value's header, the right checksum."""
        fields = bytes(self.content[offset : offset + size])
        end = offset + size
        self.content[end : end + 8] = struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))

    def seal_record(self, offset: int) -> None:
        if self.chance.random() < 0.7:
            self.seal(offset, 336)

    def put(self, offset: int, value: bytes) -> None:
        self.content[offset : offset + len(value)] = value

    def save(self) -> None:
        self.path.write_bytes(self.content)
        if self.length is not None:
            os.truncate(self.path, self.length)


Edit = Callable[[Target], None]


def flipped_bits(target: Target) -> None:
    for _ in range(target.chance.choice((1, 1, 3, 50))):
        if target.content:
            target.content[target.chance.randrange(len(target.content))] ^= (
                1 << target.chance.randrange(8)
            )


def segment_field(target: Target) -> None:
    offset, size = target.chance.choice(((0, 8), (8, 2), (16, 8), (32, 8), (40, 8), (40, 8)))
    target.put(offset, struct.pack("<Q", target.number())[:size])
    if target.chance.random() < 0.8:
        target.seal(0, 48)


def segment_header(target: Target) -> None:
    """A whole header of another length, or of another number or identity."""
    identity = bytes(target.content[16:32])
    number = int.from_bytes(target.content[32:40], "little")
    capacity = target.number() // BLOCK * BLOCK
    target.put(0, encode_segment(SegmentHeader(identity, number, capacity)))


def record_field(target: Target) -> None:
    at = target.record()
    offset, size = target.chance.choice(
        ((0, 8), (5, 1), (8, 2), (16, 8), (32, 8), (40, 8), (40, 8), (48, 8), (80, 8), (96, 8))
    )
    target.put(at + offset, struct.pack("<Q", target.number())[:size])
    target.seal_record(at)


def value_field(target: Target) -> None:
    """A field of the header that a payload has, with the right checksums around it."""
    at = target.record()
    offset, size = target.chance.choice(((0, 8), (8, 2), (10, 2), (12, 4), (16, 8), (24, 8)))
    target.put(at + 80 + offset, struct.pack("<Q", target.number())[:size])
    target.seal(at + 80, 248)
    target.seal_record(at)


def both_lengths(target: Target) -> None:
    """A record and its value's header agree on a length."""
    at, length = target.record(), struct.pack("<Q", target.number())
    target.put(at + 40, length)
    target.put(at + 80 + 16, length)
    target.seal(at + 80, 248)
    target.seal(at, 336)


def made_up_record(target: Target) -> None:
    """A record of any length and key, right for its place."""
    at = target.block()
    key = target.chance.choice(PLACES[:-1]).key
    place = Place(bytes(target.content[16:32]), at)
    made = Record(key, target.number(), target.chance.random() < 0.7, bytes(HEADER_NBYTES))
    target.put(at, encode_record(place, made))


def copied_record(target: Target) -> None:
    """A record once more, at a place that it is made right for."""
    source, at = target.record(), target.block()
    size = target.chance.choice((BLOCK, 2 * BLOCK, 4 * BLOCK))
    target.put(at, bytes(target.content[source : source + size]))
    target.put(at + 16, bytes(target.content[16:32]) + struct.pack("<Q", at))
    target.seal(at, 336)


def cut_or_longer(target: Target) -> None:
    if target.chance.random() < 0.4:
        target.length = target.chance.randrange(len(target.content) + 1)
    else:
        target.length = target.chance.choice(LENGTHS)


def splice(target: Target) -> None:
    other = target.chance.choice(target.others).read_bytes()
    unit = target.chance.choice((1, 8, 512, BLOCK))
    start = target.chance.randrange(0, max(1, len(other)), unit)
    nbytes = unit * target.chance.randrange(1, 9)
    at = target.chance.randrange(0, len(target.content) + 1, unit)
    behind = at + nbytes if target.chance.random() < 0.5 else at
    target.content[at:behind] = other[start : start + nbytes]


def missing_part(target: Target) -> None:
    at = target.block()
    del target.content[at : at + target.chance.choice((1, 8, BLOCK, 3 * BLOCK))]


def zeros(target: Target) -> None:
    at = target.block()
    target.put(at, bytes(min(BLOCK, len(target.content) - at)))


EDITS: tuple[Edit, ...] = (
    flipped_bits,
    segment_field,
    segment_header,
    record_field,
    value_field,
    both_lengths,
    made_up_record,
    copied_record,
    cut_or_longer,
    splice,
    missing_part,
    zeros,
)


def value(number: int) -> Value:
    content = record(PLACES[number], SIZES[number])
    return Value(memoryview(content)[:HEADER_NBYTES], memoryview(content)[HEADER_NBYTES:])


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segment that was closed, and one whose writer died: copied while it was written to."""
    directory = tmp_path_factory.mktemp("stocked")
    left = tmp_path_factory.mktemp("left")
    for numbers in ((0, 1, 2), (3, 4, 5)):
        store = open_store(directory, CAPACITY, SEGMENT)
        keys = [PLACES[number].key for number in numbers]
        assert {*store.set_from(keys, [value(number) for number in numbers], 10.0)} == {Status.OK}
        if 3 in numbers:
            shutil.copytree(directory, left, dirs_exist_ok=True)
        store.close()
    return left


@pytest.fixture
def n_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that were read at a time; nothing waits for the disk."""
    monkeypatch.setattr(os, "fdatasync", lambda fd: None)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    told: list[int] = []
    given = DiskFile.read

    def read(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        told.append(sum(map(len, pieces)))
        given(self, pieces, offset)

    monkeypatch.setattr(DiskFile, "read", read)
    return told


def expect_sound(store: FileBackend) -> None:
    """Stored records are read unchanged, or missed; others can be stored."""
    for number, size in enumerate(SIZES):
        found = room(size)
        (status,) = store.get_into([PLACES[number].key], [found], 10.0)
        if status is Status.OK:
            told = check(found.header, found.payload, PLACES[number], FINGERPRINT.digest)
            assert told is not Status.OK or found.payload == payload(PLACES[number], size)
            if told is not Status.OK:
                store.remove([PLACES[number].key])
    content = memoryview(record(NEW, NEW_SIZE))
    new = Value(content[:HEADER_NBYTES], content[HEADER_NBYTES:])
    (status,) = store.set_from([NEW.key], [new], 10.0)
    assert status in (Status.OK, Status.FULL)
    store.verify()
    found = room(NEW_SIZE)
    (told,) = store.get_into([NEW.key], [found], 10.0)
    assert (told is Status.OK) == (status is Status.OK)
    assert status is Status.FULL or found.payload == new.payload
    store.remove([PLACES[0].key, NEW.key])
    store.flush()
    store.stats()


def fuzz(stocked: Path, directory: Path, seed: int, n: int, n_read: list[int]) -> None:
    chance = random.Random(seed)
    for case in range(n):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(stocked, directory)
        paths = segments(directory)
        for path in chance.sample(paths, chance.choice((1, 1, 2))):
            target = Target(path, chance, segments(stocked))
            for edit in chance.choices(EDITS, k=chance.choice((1, 1, 2, 4))):
                edit(target)
            target.save()
        n_read.clear()
        try:
            for _ in range(chance.choice((1, 1, 2))):
                store = open_store(directory, CAPACITY, SEGMENT)
                try:
                    expect_sound(store)
                finally:
                    store.close()
            assert max(n_read) <= LONGEST_RUN, "memory is bounded"
            assert sum(n_read) <= MOST_READ, "and so is time"
        except BaseException as error:
            raise AssertionError(f"seed {seed}, case {case}") from error


def test_60_edits_of_segments_are_misses_or_change_nothing(
    stocked: Path, tmp_path: Path, n_read: list[int]
) -> None:
    fuzz(stocked, tmp_path / "store", 1, 60, n_read)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 12))
def test_10_000_edits_of_segments_are_misses_or_change_nothing(
    stocked: Path, tmp_path: Path, n_read: list[int], seed: int
) -> None:
    fuzz(stocked, tmp_path / "store", seed, 1000, n_read)


@pytest.mark.parametrize("length", [SEGMENT + 1, 64 << 30])
@pytest.mark.parametrize("which", [0, 1], ids=["sealed", "left by a dead writer"])
def test_a_segment_made_longer_takes_no_longer_to_open(
    stocked: Path, tmp_path: Path, n_read: list[int], which: int, length: int
) -> None:
    directory = tmp_path / "store"
    shutil.copytree(stocked, directory)
    os.truncate(segments(directory)[which], length)
    store = open_store(directory, CAPACITY, SEGMENT)
    assert [*store.exists([place.key for place in PLACES[: len(SIZES)]])] == [True] * len(SIZES)
    assert sum(n_read) <= 4 * SEGMENT
    assert store.stats().nbytes <= 2 * SEGMENT
    expect_sound(store)
    store.close()
    assert sum(path.stat().st_size for path in segments(directory)) <= CAPACITY


def test_a_segment_that_says_it_is_of_4_gib_takes_no_longer_to_open(
    stocked: Path, tmp_path: Path, n_read: list[int]
) -> None:
    directory = tmp_path / "store"
    shutil.copytree(stocked, directory)
    for path in segments(directory):
        target = Target(path, random.Random(1), ())
        identity, number = bytes(target.content[16:32]), int(path.stem, 16)
        target.put(0, encode_segment(SegmentHeader(identity, number, MAX_SEGMENT_NBYTES)))
        target.length = 64 << 30
        target.save()
    store = open_store(directory, CAPACITY, SEGMENT)
    assert [*store.exists([place.key for place in PLACES[: len(SIZES)]])] == [True] * len(SIZES)
    assert sum(n_read) <= 4 << 20, "only where there is data"
    store.close()


def test_a_segment_that_claims_too_large_a_size_is_not_read(stocked: Path, tmp_path: Path) -> None:
    directory = tmp_path / "store"
    shutil.copytree(stocked, directory)
    target = Target(segments(directory)[0], random.Random(1), ())
    identity, number = bytes(target.content[16:32]), int(target.path.stem, 16)
    for capacity in (MAX_SEGMENT_NBYTES + BLOCK, 2**63, 2**64 - BLOCK, 0, BLOCK, SEGMENT + 1):
        target.put(0, encode_segment(SegmentHeader(identity, number, capacity)))
        target.save()
        store = open_store(directory, CAPACITY, SEGMENT)
        assert store.stats().details["foreign_files"] == 1
        store.close()
        assert target.path.read_bytes() == target.content, "a file that is no segment is left alone"


def test_a_thousand_records_of_one_key_are_one(tmp_path: Path) -> None:
    """And evicting them takes no longer than others."""
    store = open_store(tmp_path, 32 << 20, 8 << 20)
    key = PLACES[4].key
    (path,) = (tmp_path / f"{7:016x}.kvseg",)
    identity, n = bytes(16), 1000
    made = [
        encode_record(Place(identity, BLOCK * number), Record(key, 0, True, bytes(HEADER_NBYTES)))
        for number in range(1, n + 1)
    ]
    header = encode_segment(SegmentHeader(identity, 7, 8 << 20))
    path.write_bytes(b"".join([header, *made]))
    assert [*store.exists([key])] == [True]
    assert store.stats().n_records == 1
    assert [*store.remove([key])] == [Status.OK]
    assert [*store.exists([key])] == [False]
    assert store.verify().n_records == 0
    store.close()
