"""The file backend beside the disk it is on: raw direct I/O, and one file per page.

One run, one disk, taking turns: in every round each way writes the same payloads and makes them
durable, then reads them back in the order they were written. `raw` is one call per payload on a
file that was preallocated for it, as the store's segments are; `again` is the same on a file whose
blocks were all written before, which a store of new data cannot have. `file` is `Storage.set` and
`get` over the `file` backend, headers and checksums of every byte included; `page` creates a file
per payload with direct I/O, makes its data durable, renames it so that no half of it is ever seen,
and makes the names durable at the end.

Ratios are of one round; the table shows their medians, and the bars of the tier's requirement.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from _measure import arguments, heading

from kvgraft.storage import Fingerprint, PageChain, Status, Storage, open_storage
from kvgraft.storage.file.disk import supports_direct
from kvgraft.storage.memory import aligned

SIZES = (256 << 10, 1 << 20, 4 << 20)
PAGE = 16
WITHIN = 0.85
TIMES = 3.0
BARRED_RAW = (1 << 20, 4 << 20)
BARRED_PER_PAGE = 256 << 10
FLAGS = os.O_RDWR | os.O_CREAT


class Case:
    """Payloads of one size, and the three ways to keep them in a directory."""

    def __init__(self, directory: Path, size: int, total: int, *, direct: bool) -> None:
        self.directory = directory
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
        chain.grow(np.arange(self.n * PAGE, dtype=np.int32).tobytes())
        self.addresses = [chain.address(page, "full") for page in range(self.n)]
        self.fingerprint = fingerprint

    def raw(self) -> tuple[float, float]:
        return self._raw(lambda fd: os.posix_fallocate(fd, 0, self.n * self.size))

    def again(self) -> tuple[float, float]:
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

    def per_page(self) -> tuple[float, float]:
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

    def file(self) -> tuple[float, float]:
        store = self.directory / "store"
        store.mkdir()
        capacity = 2 * self.n * self.size + (256 << 20)
        storage = Storage(self.fingerprint, open_storage(f"file:{store}?capacity={capacity}"))

        def write() -> None:
            stored = storage.set(self.addresses, self.pieces, 60.0)
            assert stored.wait(60.0)
            assert set(stored.statuses) == {Status.OK}
            flushed = storage.flush(60.0)
            assert flushed.wait(60.0)
            assert flushed.value is True

        def read() -> None:
            fetched = storage.get(self.addresses, self.targets, 60.0)
            assert fetched.wait(60.0)
            assert set(fetched.statuses) == {Status.OK}

        seconds = timed(write), timed(read)
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
    given = parser.parse_args()
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
            clock="wall time",
        )
        print(
            "payload         again    raw   file   page MB/s   file/again  file/raw   bar"
            "  file/page   bar"
        )
        for size in SIZES:
            show(Case(directory, size, total, direct=direct), rounds)


def show(case: Case, rounds: int) -> None:
    ways = (case.again, case.raw, case.file, case.per_page)
    samples = [[way() for way in ways] for _ in range(rounds)]
    volume = case.n * case.size / 1e6
    for index, what in enumerate(("write", "read")):
        speeds = [
            statistics.median(volume / each[way][index] for each in samples)
            for way in range(len(ways))
        ]
        again, raw, page = (
            statistics.median(each[way][index] / each[2][index] for each in samples)
            for way in (0, 1, 3)
        )
        within = WITHIN if case.size in BARRED_RAW else None
        times = TIMES if case.size == BARRED_PER_PAGE and what == "write" else None
        print(
            f"{case.size >> 10:>5} KiB {what:5}", *(f"{speed:6.0f}" for speed in speeds), end="  "
        )
        print(f"{again:15.2f} {raw:9.2f} {verdict(raw, within):>5}", end="  ")
        print(f"{page:9.2f} {verdict(page, times):>5}", flush=True)


def verdict(ratio: float, bar: float | None) -> str:
    """Whether a ratio meets its bar."""
    if bar is None:
        return "-"
    return "ok" if ratio >= bar else f"<{bar}"


if __name__ == "__main__":
    main()
