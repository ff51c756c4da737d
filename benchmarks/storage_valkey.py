"""The `valkey` store beside the client it is made of, on one server.

One run, one server of the script's own on loopback, taking turns: in every round each way stores
the same payloads, then fetches them into memory. `raw` is one client and one thread that calls
`set` and `get`, the latter into a buffer: the client's best without help.
`raw2` is two such threads on one client, since `Storage` calls from two. `valkey` is `Storage.set`
and `get` over the `valkey` backend, headers and checksums of every byte included.

Ratios are of one round; the table shows their medians, and the bar. On a machine that others use
the wall ratio is their doing as well; `cpu` is the processor time of this process (client threads
included, server not) per byte, `valkey` over `raw`, which depends less on them.
"""

from __future__ import annotations

import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from time import perf_counter, process_time
from typing import NamedTuple

import glide_sync as glide
import numpy as np
from _measure import arguments, grid, heading

from kvgraft_storage import Fingerprint, PageChain, Status, Storage, open_storage

SIZES = (256 << 10, 1 << 20, 4 << 20)
PAGE = 16
BAR = 0.8
HOST = "127.0.0.1"
START_S = 10.0


class Cost(NamedTuple):
    """Wall and processor seconds."""

    wall: float
    cpu: float


class Case:
    """Payloads of one size, and the ways to keep them on a server."""

    def __init__(self, port: int, size: int, total: int) -> None:
        self.size = size
        self.n = total // size
        rng = np.random.default_rng(size)
        content = rng.integers(0, 1 << 63, self.n * size // 8, dtype=np.int64)
        memory = content.data.cast("B")
        self.pieces = [memory[i * size : (i + 1) * size] for i in range(self.n)]
        target = np.ones(self.n * size, np.uint8).data  # resident before it is timed
        self.targets = [target[i * size : (i + 1) * size] for i in range(self.n)]
        self.names = [b"raw:%d" % number for number in range(self.n)]
        fingerprint = Fingerprint("benchmark", "0", "bf16", PAGE, {"full": size})
        chain = PageChain(fingerprint)
        chain.grow(np.arange(self.n * PAGE, dtype=np.int32).tobytes())
        self.addresses = [chain.address(page, "full") for page in range(self.n)]
        self.storage = Storage(fingerprint, open_storage(f"valkey:{HOST}:{port}?prefix=bench:"))
        self.client = glide.GlideClient.create(
            glide.GlideClientConfiguration([glide.NodeAddress(HOST, port)], request_timeout=60_000)
        )

    def raw(self) -> tuple[Cost, Cost]:
        return timed(lambda: self._put(0, 1)), timed(lambda: self._take(0, 1))

    def raw2(self) -> tuple[Cost, Cost]:
        return timed(lambda: in_two(self._put)), timed(lambda: in_two(self._take))

    def _put(self, first: int, step: int) -> None:
        for number in range(first, self.n, step):
            self.client.set(self.names[number], self.pieces[number])

    def _take(self, first: int, step: int) -> None:
        for number in range(first, self.n, step):
            told = self.client.get(self.names[number], buffer=self.targets[number])
            assert int(told or 0) == self.size

    def valkey(self) -> tuple[Cost, Cost]:
        def write() -> None:
            stored = self.storage.set(self.addresses, self.pieces, 60.0)
            assert stored.wait(60.0)
            assert set(stored.statuses) == {Status.OK}

        def read() -> None:
            fetched = self.storage.get(self.addresses, self.targets, 60.0)
            assert fetched.wait(60.0)
            assert set(fetched.statuses) == {Status.OK}

        return timed(write), timed(read)

    def close(self) -> None:
        assert self.storage.ask("clear", lambda store: store.clear()).wait(60.0)
        assert self.storage.close()
        for name in self.names:
            self.client.delete([name])
        self.client.close()


def in_two(work: Callable[[int, int], None]) -> None:
    """Run every second piece of work on a thread of its own."""
    threads = [threading.Thread(target=work, args=(first, 2)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def timed(operation: Callable[[], None]) -> Cost:
    """The cost of an operation."""
    wall, cpu = perf_counter(), process_time()
    operation()
    return Cost(perf_counter() - wall, process_time() - cpu)


@contextmanager
def server(binary: str) -> Iterator[int]:
    """A server of this run's own, nothing on disk; its port."""
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="kvgraft-bench-") as directory:
        words = f"--port {port} --bind {HOST} --dir {directory} --appendonly no --save"
        process = subprocess.Popen([binary, *words.split(), ""], stdout=subprocess.DEVNULL)
        try:
            end = perf_counter() + START_S
            while process.poll() is None and perf_counter() < end:
                try:
                    socket.create_connection((HOST, port)).close()
                    break
                except OSError:
                    time.sleep(0.01)
            yield port
        finally:
            process.kill()
            process.wait()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, help="rounds (default 25, quick 3)")
    given = parser.parse_args()
    rounds = given.rounds or (3 if given.quick else 25)
    total = 64 << 20
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        print("skipped: neither valkey-server nor redis-server is installed")
        return
    told = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    heading(
        "the valkey backend beside its client",
        server=" ".join(told.stdout.split()[:3]) + ", loopback, nothing on disk",
        client=f"valkey-glide-sync {version('valkey-glide-sync')}",
        bytes_per_round=f"{total >> 20} MiB",
        rounds=f"{rounds}, medians",
        clock="wall time",
    )
    rows: list[list[str]] = []
    with server(binary) as port:
        for size in SIZES:
            case = Case(port, size, total)
            rows += rows_of(case, rounds)
            case.close()
    grid(
        ["payload", "", "raw", "raw2", "valkey MB/s", "valkey/raw", "bar", "valkey/raw2", "cpu"],
        rows,
    )


def rows_of(case: Case, rounds: int) -> Iterator[list[str]]:
    """The lines of one size, writing and reading."""
    ways = (case.raw, case.raw2, case.valkey)
    case.raw()  # the server's memory is its own before it is timed
    case.valkey()
    samples = [[way() for way in ways] for _ in range(rounds)]
    volume = case.n * case.size / 1e6
    for index, what in enumerate(("write", "read")):
        costs = [[way[index] for way in each] for each in samples]
        speeds = [statistics.median(volume / each[way].wall for each in costs) for way in range(3)]
        over = statistics.median(raw.wall / store.wall for raw, _, store in costs)
        over2 = statistics.median(raw2.wall / store.wall for _, raw2, store in costs)
        cpu = statistics.median(store.cpu / raw.cpu for raw, _, store in costs)
        cells = [f"{case.size >> 10} KiB", what, *(f"{each:.0f}" for each in speeds)]
        verdict = "ok" if over >= BAR else f"<{BAR}"
        yield [*cells, f"{over:.2f}", verdict, f"{over2:.2f}", f"{cpu:.2f}"]


if __name__ == "__main__":
    main()
