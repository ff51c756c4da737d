"""The file backend beside the disk it is on: raw direct I/O, and one file per page.

One run, one disk, taking turns in an order that changes: in every round each way writes the same
payloads and makes them durable before the clock stops, then reads them back in the order they were
written. Writing to a file system's blocks for the first time costs more than writing over them, so
like is compared with like:

    new      one call per payload, to a file that was preallocated and never written
    fresh    `Storage.set` and `get` over `file`, in an empty directory: its segments are like that
    over     one call per payload, to a file whose blocks were all written before
    full     `Storage.set` and `get` over `file` that is full, as it is for most of its life: every
             new segment is made of an evicted one's blocks
    page     a file per payload: direct I/O, made durable, renamed so that no half is ever seen, and
             the names made durable at the end

`fresh` and `full` include headers, checksums of every byte, and making and evicting segments.
Ratios are of one round; the table shows their medians, the quartiles, and the tier's bars.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
from _measure import arguments, heading

from kvgraft_file.disk import supports_direct
from kvgraft_storage import (
    Address,
    Fingerprint,
    PageChain,
    Status,
    Storage,
    SupervisionLimits,
    open_storage,
)
from kvgraft_storage.memory import aligned

SIZES = (256 << 10, 1 << 20, 4 << 20)
PAGE = 16
WITHIN = 0.85
TIMES = 3.0
BARRED_RAW = (1 << 20, 4 << 20)
BARRED_PER_PAGE = 256 << 10
FLAGS = os.O_RDWR | os.O_CREAT
WAYS = ("new", "fresh", "over", "full", "page")
RATIOS = {
    "fresh/new": ("fresh", "new"),
    "full/over": ("full", "over"),
    "fresh/page": ("fresh", "page"),
    "full/page": ("full", "page"),
}


class Case:
    """Payloads of one size, and the ways to keep them in a directory."""

    def __init__(
        self, directory: Path, size: int, total: int, limits: SupervisionLimits, *, direct: bool
    ) -> None:
        self.directory = directory
        self.limits = limits
        self.size = size
        self.n = total // size
        self.flags = FLAGS | (os.O_DIRECT if direct else 0)
        rng = np.random.default_rng(size)
        self.memory = aligned(self.n * size)
        content = rng.integers(0, 1 << 63, self.n * size // 8, dtype=np.int64)
        np.copyto(np.frombuffer(self.memory, np.int64), content)
        self.pieces = [self.memory[i * size : (i + 1) * size] for i in range(self.n)]
        self.target = aligned(self.n * size)
        np.frombuffer(self.target, np.uint8).fill(1)  # resident before it is timed
        self.targets = [self.target[i * size : (i + 1) * size] for i in range(self.n)]
        fingerprint = Fingerprint("benchmark", "0", "bf16", PAGE, {"full": size})
        chain = PageChain(fingerprint)
        chain.grow(np.arange(3 * self.n * PAGE, dtype=np.int32).tobytes())
        self.n_before = self.n * 3 // 2
        places = [chain.address(page, "full") for page in range(self.n + self.n_before)]
        self.addresses, self.before = places[: self.n], places[self.n :]
        self.fingerprint = fingerprint

    def new(self) -> tuple[float, float]:
        return self._raw(lambda fd: os.posix_fallocate(fd, 0, self.n * self.size))

    def over(self) -> tuple[float, float]:
        return self._raw(lambda fd: os.write(fd, self.memory))

    def _raw(self, prepare: Callable[[int], object]) -> tuple[float, float]:
        path = self.directory / "raw"
        fd = os.open(path, self.flags)
        prepare(fd)

        def write() -> None:
            for number, piece in enumerate(self.pieces):
                os.pwrite(fd, piece, number * self.size)
            os.fdatasync(fd)

        def read() -> None:
            for number, piece in enumerate(self.targets):
                os.preadv(fd, [piece], number * self.size)

        seconds = timed(write), timed(read)
        os.close(fd)
        path.unlink()
        return seconds

    def page(self) -> tuple[float, float]:
        paths = [self.directory / f"{number}.page" for number in range(self.n)]

        def write() -> None:
            for path, piece in zip(paths, self.pieces):
                made = path.with_suffix(".tmp")
                fd = os.open(made, self.flags)
                os.write(fd, piece)
                os.fdatasync(fd)
                os.close(fd)
                made.rename(path)
            fd = os.open(self.directory, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)

        def read() -> None:
            for path, piece in zip(paths, self.targets):
                fd = os.open(path, self.flags)
                os.readv(fd, [piece])
                os.close(fd)

        seconds = timed(write), timed(read)
        for path in paths:
            path.unlink()
        return seconds

    def fresh(self) -> tuple[float, float]:
        return self._file(4 * self.n * self.size, [])

    def full(self) -> tuple[float, float]:
        return self._file(self.n_before * self.size, self.before)

    def _file(self, capacity: int, before: Sequence[Address]) -> tuple[float, float]:
        store = self.directory / "store"
        store.mkdir()
        segment = min(64 << 20, self.n * self.size // 4)
        url = f"file:{store}?capacity={capacity}&segment={segment}"
        storage = Storage(self.fingerprint, open_storage(url), self.limits)

        def keep(addresses: Sequence[Address]) -> None:
            pieces = [self.pieces[number % self.n] for number in range(len(addresses))]
            stored = storage.set(addresses, pieces, 60.0)
            assert stored.wait(60.0)
            assert set(stored.statuses) == {Status.OK}
            flushed = storage.flush(60.0)
            assert flushed.wait(60.0)
            assert flushed.value is True

        def read() -> None:
            fetched = storage.get(self.addresses, self.targets, 60.0)
            assert fetched.wait(60.0)
            assert set(fetched.statuses) == {Status.OK}

        if before:
            keep(before)
        seconds = timed(lambda: keep(self.addresses)), timed(read)
        storage.close()
        shutil.rmtree(store)
        return seconds


def timed(operation: Callable[[], None]) -> float:
    """Wall seconds."""
    start = perf_counter()
    operation()
    return perf_counter() - start


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: here)")
    parser.add_argument("--rounds", type=int, help="rounds (default 9, quick 3)")
    parser.add_argument("--workers", type=int, default=SupervisionLimits().n_workers)
    given = parser.parse_args()
    limits = SupervisionLimits(n_workers=given.workers)
    rounds = given.rounds or (3 if given.quick else 9)
    total = (64 if given.quick else 256) << 20
    with tempfile.TemporaryDirectory(dir=given.directory or Path.cwd(), prefix=".bench-") as made:
        directory = Path(made)
        direct = supports_direct(directory)
        heading(
            "the file backend beside its disk",
            directory=directory.parent,
            direct_io=direct,
            bytes_per_round=f"{total >> 20} MiB, durable before the clock stops",
            rounds=f"{rounds}, medians",
            workers=limits.n_workers,
            clock="wall time",
        )
        print("payload      ", *(f"{name:>6}" for name in WAYS), "MB/s", *RATIOS, sep="  ")
        for size in SIZES:
            show(Case(directory, size, total, limits, direct=direct), rounds)


def show(case: Case, rounds: int) -> None:
    samples = []
    for number in range(rounds):
        turn = number % len(WAYS)
        order = [*WAYS[turn:], *WAYS[:turn]][:: -1 if number % 2 else 1]
        samples.append({way: getattr(case, way)() for way in order})
    volume = case.n * case.size / 1e6
    for index, what in enumerate(("write", "read")):
        speeds = [statistics.median(volume / each[way][index] for each in samples) for way in WAYS]
        print(f"{case.size >> 10:>5} KiB {what:5}", *(f"{speed:6.0f}" for speed in speeds), end="")
        for mine, other in RATIOS.values():
            ratios = [each[other][index] / each[mine][index] for each in samples]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"   {middle:5.2f} [{low:.2f} {high:.2f}]", end=" ")
            print(verdict(middle, bar(case.size, what, other)), end="")
        print(flush=True)


def bar(size: int, what: str, other: str) -> float | None:
    """The bar of a ratio; None where there is none."""
    if other == "page":
        return TIMES if size == BARRED_PER_PAGE and what == "write" else None
    return WITHIN if size in BARRED_RAW else None


def verdict(ratio: float, bar: float | None) -> str:
    """Whether a ratio meets its bar."""
    if bar is None:
        return "-    "
    return "ok   " if ratio >= bar else f"<{bar:.2f}"


if __name__ == "__main__":
    main()
