"""Damage of every kind, injected into segments: no wrong byte is ever handed out (S9)."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import xxhash

from kvgraft_file import FileBackend
from kvgraft_storage import Status, Storage
from kvgraft_storage.payload import encode_header
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, settled, stored

from .store import open_store

NBYTES = 9000
SIZE = 4096 + 3 * 4096
PLACES = addresses(48)
BATCH = 15
MISSES = {Status.MISS, Status.CORRUPT, Status.STALE, Status.TOO_LARGE}


class Target(NamedTuple):
    """A record on disk, and another one of the same size."""

    fd: int
    offset: int
    other_fd: int
    other: int
    number: int

    def flip(self, position: int, bit: int) -> None:
        (byte,) = os.pread(self.fd, 1, self.offset + position)
        os.pwrite(self.fd, bytes([byte ^ 1 << bit]), self.offset + position)

    def take(self, start: int, nbytes: int) -> None:
        """Copy a part of the other record over this one's."""
        os.pwrite(self.fd, os.pread(self.other_fd, nbytes, self.other + start), self.offset + start)


Injection = Callable[[Target, random.Random], None]


def bit_in_payload(target: Target, chance: random.Random) -> None:
    target.flip(4096 + chance.randrange(NBYTES), chance.randrange(8))


def bit_in_block(target: Target, chance: random.Random) -> None:
    target.flip(chance.randrange(344), chance.randrange(8))


def several_bits(target: Target, chance: random.Random) -> None:
    for position in chance.sample(range(344), 3) + chance.sample(range(4096, 4096 + NBYTES), 20):
        target.flip(position, chance.randrange(8))


def zeroed_block(target: Target, chance: random.Random) -> None:
    os.pwrite(target.fd, bytes(4096), target.offset + 4096 * chance.randrange(4))


def torn_tail(target: Target, chance: random.Random) -> None:
    start = chance.randrange(1, 4096 + NBYTES)
    os.pwrite(target.fd, bytes(SIZE - start), target.offset + start)


def garbage(target: Target, chance: random.Random) -> None:
    start = chance.randrange(4096 + NBYTES)
    os.pwrite(target.fd, chance.randbytes(chance.randrange(8, 512)), target.offset + start)


def others_payload(target: Target, chance: random.Random) -> None:
    target.take(4096, NBYTES)


def others_block(target: Target, chance: random.Random) -> None:
    target.take(0, 4096)


def others_record(target: Target, chance: random.Random) -> None:
    target.take(0, SIZE)


def others_header_inside(target: Target, chance: random.Random) -> None:
    """A block that is whole, around the header of another key and its payload."""
    target.take(80, 256)
    target.take(4096, NBYTES)
    fields = os.pread(target.fd, 336, target.offset)
    os.pwrite(
        target.fd, xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little"), target.offset + 336
    )


def foreign_fingerprint(target: Target, chance: random.Random) -> None:
    """A whole record, computed by another model."""
    data = os.pread(target.fd, NBYTES, target.offset + 4096)
    header = encode_header(PLACES[target.number], chance.randbytes(32), data)
    os.pwrite(target.fd, header, target.offset + 80)
    fields = os.pread(target.fd, 336, target.offset)
    os.pwrite(
        target.fd, xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little"), target.offset + 336
    )


INJECTIONS: tuple[Injection, ...] = (
    bit_in_payload,
    bit_in_block,
    several_bits,
    zeroed_block,
    torn_tail,
    garbage,
    others_payload,
    others_block,
    others_record,
    others_header_inside,
    foreign_fingerprint,
)


def inject(directory: Path, kind: Injection, n: int) -> None:
    """Damage records and fetch them, `n` times; some times from a store opened anew."""
    chance = random.Random(f"{kind.__name__} {n}")
    backend = open_store(directory, 8 << 20, 1 << 20)
    storage = Storage(FINGERPRINT, backend)
    changed = 0
    for _ in range(n // BATCH):
        assert stored(storage, PLACES, NBYTES) == [Status.OK] * len(PLACES)
        numbers = chance.sample(range(len(PLACES)), 2 * BATCH)
        damaged = numbers[:BATCH]
        for number, other in zip(damaged, numbers[BATCH:]):
            with target_of(backend, number, other) as target:
                kind(target, chance)
        if chance.random() < 0.3:
            assert storage.close()
            backend = open_store(directory, 8 << 20, 1 << 20)
            storage = Storage(FINGERPRINT, backend)
        places = [PLACES[number] for number in damaged]
        told = fetched(storage, places, NBYTES)
        assert set(told) <= MISSES | {Status.OK}
        changed += sum(status is not Status.OK for status in told)
        settled(storage.remove(places))
    assert changed > n * 0.6, "damage to padding, and zeros over zeros, change nothing"
    assert storage.close()


@contextmanager
def target_of(backend: FileBackend, number: int, other: int) -> Iterator[Target]:
    """Where two records are; the back door of this test."""
    entries = backend._catalog.entries
    mine, its = entries[PLACES[number].key], entries[PLACES[other].key]
    with mine.segment.file.path.open("r+b") as one, its.segment.file.path.open("rb") as two:
        yield Target(one.fileno(), mine.offset, two.fileno(), its.offset, number)


@pytest.mark.one_in(9)
@pytest.mark.parametrize("kind", INJECTIONS, ids=lambda kind: kind.__name__)
def test_no_wrong_byte_in_300_injections(kind: Injection, tmp_path: Path) -> None:
    inject(tmp_path, kind, 300)


@pytest.mark.long
@pytest.mark.parametrize("kind", INJECTIONS, ids=lambda kind: kind.__name__)
def test_no_wrong_byte_in_10_000_injections(kind: Injection, tmp_path: Path) -> None:
    inject(tmp_path, kind, 10_000)


def test_verify_reports_damage_and_changes_nothing(tmp_path: Path) -> None:
    backend = open_store(tmp_path)
    storage = Storage(FINGERPRINT, backend)
    stored(storage, PLACES[:4], NBYTES)
    with target_of(backend, 1, 2) as target:
        target.flip(4096 + 100, 3)
    report = backend.verify()
    assert report.n_records == 4
    ((where, key, reason),) = report.damaged
    assert where.endswith(".kvseg@20480")
    assert key == PLACES[1].key.hex()
    assert reason == f"payload of {NBYTES} bytes does not match its checksum"
    assert backend.verify() == report
    assert storage.close()
