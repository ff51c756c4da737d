"""Loading small payloads through `Storage` over `file`, beside a plain file per payload.

The plain files are those of vLLM's own `fs` tier where `--vllm` names a directory that holds its
Python files (`pip download --no-deps vllm==0.33.0`, unzipped): its functions store and load. Else
functions of the same shape do, written here: a temporary file that is renamed, read whole with one
`readv`, direct I/O. Neither checks anything. Through `Storage` every payload is checked to its last
byte, and its names as well.

An engine loads jobs: some payloads each, into rows of one aligned pool. All jobs of a case are
submitted at once; `fs` has 16 threads and carries a job out on one of them, as vLLM does; `Storage`
gets one call a job and is asked for completions.

    one       one job after the other, payloads in the order in which they were stored
    eight     eight jobs at once, in that order
    mixed     eight jobs at once, payloads drawn from all that were stored, so that no two of a job
              are neighbours; without a bar, since jobs are parts of one prompt, stored in order

The two take turns, with the jobs that are submitted together. Ratios are of one round: `file` over
`fs`, in bytes a second; medians, quartiles.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from types import ModuleType

import numpy as np
from _measure import arguments, heading

from kvgraft_file.disk import supports_direct
from kvgraft_storage import (
    Fingerprint,
    Status,
    Storage,
    SupervisionLimits,
    aligned,
    open_storage,
)

SIZES = (128 << 10, 1 << 20)
BAR = 1.0
N_THREADS = 16
JOB_NBYTES = 4 << 20
CASES = ("one", "eight", "mixed")
AT_ONCE = 8
TIMEOUT_S = 60.0

Jobs = Sequence[Sequence[int]]


class PlainFiles:
    """A file a payload, as vLLM's `fs` tier has them."""

    name = "same shape, ours"

    def __init__(self, *, direct: bool) -> None:
        self._flags = os.O_DIRECT if direct else 0

    def store(self, paths: Sequence[str], memory: memoryview, offsets: list[int], n: int) -> None:
        for path, offset in zip(paths, offsets):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path + ".tmp", os.O_CREAT | os.O_EXCL | os.O_WRONLY | self._flags, 0o644)
            os.write(fd, memory[offset : offset + n])
            os.close(fd)
            os.replace(path + ".tmp", path)

    def load(self, paths: Sequence[str], memory: memoryview, offsets: list[int], n: int) -> None:
        for path, offset in zip(paths, offsets):
            fd = os.open(path, os.O_RDONLY | self._flags)
            assert os.readv(fd, [memory[offset : offset + n]]) == n
            os.close(fd)


class VllmFiles:
    """vLLM's own functions."""

    def __init__(self, directory: Path, *, direct: bool) -> None:
        self._io = _module(directory / "vllm/v1/kv_offload/tiering/fs/io.py")
        self.name = "vLLM's, in C" if self._io._HAS_FSIO_C else "vLLM's, in Python"
        self._direct = direct

    def store(self, paths: Sequence[str], memory: memoryview, offsets: list[int], n: int) -> None:
        for path in paths:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        self._io.batch_store_block(list(paths), memory, offsets, n, self._direct)

    def load(self, paths: Sequence[str], memory: memoryview, offsets: list[int], n: int) -> None:
        self._io.batch_load_block(list(paths), memory, offsets, n, self._direct)


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_fs_io", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Case:
    """Payloads of one size in both places, and a pool to load them into."""

    def __init__(
        self, directory: Path, files: PlainFiles | VllmFiles, size: int, total: int, workers: int
    ) -> None:
        self.size, self.n = size, total // size
        self._files = files
        self._directory = directory / f"{size}"
        self._directory.mkdir()
        source = aligned(total)
        content = np.random.default_rng(size).integers(0, 1 << 63, total // 8, dtype=np.int64)
        np.copyto(np.frombuffer(source, np.int64), content)
        self._source = source
        self._pool = aligned(total)
        np.frombuffer(self._pool, np.uint8).fill(1)  # resident before it is timed
        self._offsets = [number * size for number in range(self.n)]
        digests = [random.Random(number).randbytes(32) for number in range(self.n)]
        self._paths = [
            str(self._directory / "fs" / each.hex()[:3] / each.hex()[3:5] / f"{each.hex()}.bin")
            for each in digests
        ]
        store = self._directory / "store"
        store.mkdir()
        self.storage = Storage(
            Fingerprint("benchmark", "0", "bf16", 16, {"kv": size}),
            open_storage(f"file:{store}?capacity={3 * total}"),
            SupervisionLimits(n_workers=workers),
        )
        self._addresses = [self.storage.address(each) for each in digests]
        self._done = self.storage.completions()
        self._threads = ThreadPoolExecutor(N_THREADS)
        files.store(self._paths, source, self._offsets, size)
        told = self.storage.set(self._addresses, self._rows(source, range(self.n)), TIMEOUT_S)
        assert told.wait(TIMEOUT_S)
        assert set(told.statuses) == {Status.OK}
        flushed = self.storage.flush(TIMEOUT_S)
        assert flushed.wait(TIMEOUT_S)
        os.sync()

    def _rows(self, memory: memoryview, numbers: Sequence[int]) -> list[memoryview]:
        return [memory[n * self.size : (n + 1) * self.size] for n in numbers]

    def jobs(self, kind: str, seed: int) -> list[Jobs]:
        """Jobs that are submitted together, and after one another."""
        numbers = list(range(self.n))
        if kind == "mixed":
            random.Random(seed).shuffle(numbers)
        each = max(1, JOB_NBYTES // self.size)
        jobs = [numbers[first : first + each] for first in range(0, self.n, each)]
        at_once = 1 if kind == "one" else AT_ONCE
        return [jobs[first : first + at_once] for first in range(0, len(jobs), at_once)]

    def fs(self, jobs: Jobs) -> None:
        def load(numbers: Sequence[int]) -> None:
            paths = [self._paths[number] for number in numbers]
            offsets = [self._offsets[number] for number in numbers]
            self._files.load(paths, self._pool, offsets, self.size)

        for each in [self._threads.submit(load, numbers) for numbers in jobs]:
            each.result()

    def file(self, jobs: Jobs) -> None:
        for numbers in jobs:
            addresses = [self._addresses[number] for number in numbers]
            self._done.watch(self.storage.get(addresses, self._rows(self._pool, numbers)))
        while self._done.n_pending:
            assert self._done.wait(TIMEOUT_S)
            for ticket in self._done.take():
                assert set(ticket.statuses) == {Status.OK}

    def forget(self, jobs: Jobs) -> None:
        for numbers in jobs:
            for row in self._rows(self._pool, numbers):
                np.frombuffer(row, np.uint8).fill(1)

    def check(self, jobs: Jobs) -> None:
        for numbers in jobs:
            assert self._rows(self._pool, numbers) == self._rows(self._source, numbers)

    def close(self) -> None:
        assert self.storage.close()
        self._threads.shutdown()
        shutil.rmtree(self._directory)


def measured(case: Case, kind: str, rounds: int) -> Iterator[dict[str, float]]:
    """MiB a second by way, round by round."""
    ways: list[tuple[str, Callable[[Jobs], None]]] = [("fs", case.fs), ("file", case.file)]
    for number in range(rounds):
        seconds = dict.fromkeys(("fs", "file"), 0.0)
        for turn, jobs in enumerate(case.jobs(kind, number), number):
            for name, way in ways[:: -1 if turn % 2 else 1]:
                case.forget(jobs)
                start = perf_counter()
                way(jobs)
                seconds[name] += perf_counter() - start
                case.check(jobs)
        yield {name: case.n * case.size / spent / (1 << 20) for name, spent in seconds.items()}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--directory", type=Path, help="on the disk to measure (default: here)")
    parser.add_argument("--vllm", type=Path, help="directory that holds vllm/v1/... of its wheel")
    parser.add_argument("--rounds", type=int, help="rounds (default 9, quick 3)")
    parser.add_argument("--workers", type=int, default=SupervisionLimits().n_workers)
    given = parser.parse_args()
    rounds = given.rounds or (3 if given.quick else 9)
    total = (32 if given.quick else 128) << 20
    with tempfile.TemporaryDirectory(dir=given.directory or Path.cwd(), prefix=".bench-") as made:
        directory = Path(made)
        direct = supports_direct(directory)
        files = (
            PlainFiles(direct=direct)
            if given.vllm is None
            else VllmFiles(given.vllm, direct=direct)
        )
        heading(
            "loading small payloads beside a file per payload",
            directory=directory.parent,
            direct_io=direct,
            files=f"{files.name}, {N_THREADS} threads",
            bytes_per_round=f"{total >> 20} MiB in jobs of {JOB_NBYTES >> 20} MiB",
            rounds=f"{rounds}, medians",
            workers=given.workers,
            clock="wall time",
        )
        print("payload    case     fs    file MiB/s  file/fs (bar 1)")
        for size in SIZES:
            case = Case(directory, files, size, total, given.workers)
            for kind in CASES:
                show(size, kind, list(measured(case, kind, rounds)))
            case.close()


def show(size: int, kind: str, samples: Sequence[dict[str, float]]) -> None:
    fs, file = (statistics.median(each[way] for each in samples) for way in ("fs", "file"))
    low, middle, high = statistics.quantiles([each["file"] / each["fs"] for each in samples], n=4)
    verdict = "-" if kind == "mixed" else "ok" if middle >= BAR else "under"
    print(
        f"{size >> 10:>5} KiB {kind:>6} {fs:6.0f}  {file:6.0f}        "
        f"{middle:5.2f} [{low:.2f} {high:.2f}] {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    main()
