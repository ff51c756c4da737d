"""Kills writers while they write over records of a full store; run by `test_crash`.

python -m plugins.file.tests.overwriting DIRECTORY ROUNDS SEED

In every other round the writer kills itself with a part of a write on the disk; in the others it is
killed at any time. After each one no byte is wrong, no record is damaged, records are lost only to
make room for those stored and under way, and there is room for as many as before.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvgraft_file import FileBackend
from kvgraft_file.disk import DiskFile
from kvgraft_storage import BLOCK_NBYTES, Address, Status, Storage, Value
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_testing.storage.traffic import FINGERPRINT, addresses, fetched, record

from .store import open_store

BATCH, BATCHES = 3, 6
NBYTES = 41_000
CAPACITY, SEGMENT = 1 << 20, 1 << 18


@contextmanager
def opened(directory: Path) -> Iterator[FileBackend]:
    backend = open_store(directory, CAPACITY, SEGMENT)
    yield backend
    backend.close()


def store(backend: FileBackend, places: Sequence[Address]) -> None:
    contents = [memoryview(record(place, NBYTES)) for place in places]
    values = [Value(each[:HEADER_NBYTES], each[HEADER_NBYTES:]) for each in contents]
    told = backend.set_from([place.key for place in places], values, 10.0)
    assert {*told} <= {Status.OK}


def kept(backend: FileBackend, places: Sequence[Address]) -> set[Address]:
    """Those that are there, without a use of them."""
    hints = backend.probably_has([place.key for place in places])
    return {place for place, hint in zip(places, hints) if hint}


def cut_a_write(chance: random.Random) -> None:
    """One of the next writes of this process ends behind any of its blocks, and so does it."""
    whole, left = DiskFile.write, chance.randrange(1, BATCHES)

    def write(self: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
        nonlocal left
        left -= 1
        if left:
            whole(self, pieces, offset)
            return
        room = chance.randrange(sum(map(len, pieces)) // BLOCK_NBYTES) * BLOCK_NBYTES
        first: list[memoryview] = []
        for piece in pieces:
            first.append(piece[:room])
            room -= len(first[-1])
        whole(self, [piece for piece in first if len(piece)], offset)
        os.kill(os.getpid(), signal.SIGKILL)

    DiskFile.write = write  # type: ignore[method-assign]


def write(directory: Path, places: Sequence[Address], done: int) -> None:
    """Store batch after batch, saying so after each."""
    with opened(directory) as backend:
        for first in range(0, len(places), BATCH):
            store(backend, places[first : first + BATCH])
            os.write(done, b".")
        signal.pause()


def killed(directory: Path, places: Sequence[Address], chance: random.Random, *, cut: bool) -> int:
    """A writer's life; how many records it stored."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        if cut:
            cut_a_write(chance)
        write(directory, places, writing)
    os.close(writing)
    n_waited = 0 if cut else chance.randrange(BATCHES)
    with os.fdopen(reading, "rb") as done:
        assert len(done.read(n_waited)) == n_waited
        if not cut:
            time.sleep(chance.random() * 0.004)
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return (n_waited + len(done.read())) * BATCH


def main(directory: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    n_torn, n_stored = 0, 0
    per_round = (BATCHES + 1) * BATCH
    places = addresses(per_round * (rounds + 4))
    unused = iter(places)
    with opened(directory) as backend:
        for each in unused:
            before = kept(backend, places)
            store(backend, [each])
            if len(kept(backend, places)) == len(before):
                break
    n_full = len(before)
    for number in range(rounds):
        with opened(directory) as backend:
            before = kept(backend, places)
        assert len(before) == n_full, f"round {number}: {len(before)} records, {n_full} before"
        these = [next(unused) for _ in range(BATCHES * BATCH)]
        n_done = killed(directory, these, chance, cut=bool(number % 2))
        n_stored += n_done
        with opened(directory) as backend:
            assert backend.verify().damaged == ()
            after = kept(backend, places)
        storage = Storage(FINGERPRINT, open_store(directory, CAPACITY, SEGMENT))
        there = [place for place in places if place in after]
        assert {*fetched(storage, there, NBYTES)} == {Status.OK}
        assert storage.close()
        with opened(directory) as backend:
            assert after >= {*these[:n_done]}
            assert len(before - after) <= n_done + BATCH
            n_lost = n_full - len(after)
            assert n_lost <= BATCH
            n_torn += n_lost
            more = [next(unused) for _ in range(n_lost)]
            store(backend, more)
            assert kept(backend, places) == after | {*more}
    sys.stdout.write(json.dumps({"stored": n_stored, "torn": n_torn, "kept": n_full}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
