"""Usable pages that a full `file` store keeps of a trace, beside exact leaf-LRU.

Every request asks for the pages of its prompt, which counts as a use of those that are there, and
stores the others; a prefix that memory serves is touched, as the cache's storage tier does. A page
is usable while all pages before it are kept. Exact leaf-LRU of as many pages evicts the least
recently used page that no kept page follows; it shares no code with the store.

    .venv/bin/python benchmarks/file_eviction.py mooncake_conversation.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import heapq
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvgraft_file import FileBackend, FileOptions
from kvgraft_file.disk import DiskFile
from kvgraft_storage import BLOCK_NBYTES, Value
from kvgraft_storage.memory import aligned

SAMPLES = 20
BATCH = 64
"""Pages stored by one call."""


class LeafLru:
    """Exact leaf-LRU: pages with their parents, the oldest leaf evicted first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, int] = {}
        self.parent: dict[int, int | None] = {}
        self.children: dict[int, int] = {}
        self.oldest: list[tuple[int, int]] = []
        self.clock = 0

    def use(self, chain: Sequence[int]) -> None:
        """A sequence is asked for, and what is missing of it stored."""
        before: int | None = None
        for page in chain:
            if page not in self.used:
                self.parent[page] = before
                self.children[page] = 0
                if before is not None:
                    self.children[before] += 1
            self.used[page] = 0
            before = page
        for page in reversed(chain):
            self.clock += 1
            self.used[page] = self.clock
            heapq.heappush(self.oldest, (self.clock, page))
        while len(self.used) > self.capacity:
            self._evict()

    def _evict(self) -> None:
        while True:
            used, leaf = heapq.heappop(self.oldest)
            if self.used.get(leaf) == used and not self.children[leaf]:
                break
        before = self.parent.pop(leaf)
        del self.used[leaf], self.children[leaf]
        if before is not None:
            self.children[before] -= 1
            heapq.heappush(self.oldest, (self.used[before], before))


def usable(kept: set[int], parents: dict[int, int | None]) -> int:
    """Pages of which all pages before them are kept as well."""
    fine: dict[int | None, bool] = {None: True}
    for page in kept:
        path = []
        at: int | None = page
        while at not in fine:
            assert at is not None
            path.append(at)
            at = parents[at]
        good = fine[at]
        for each in reversed(path):
            good = fine[each] = good and each in kept
    return sum(fine[page] for page in kept)


def conversations(path: Path, n_requests: int) -> Iterator[list[int]]:
    """The pages of each request, whole blocks only."""
    with gzip.open(path, "rt") as lines:
        for number, line in enumerate(lines):
            if number == n_requests:
                return
            chain = json.loads(line)["hash_ids"][:-1]
            if chain:
                yield chain


def key(page: int) -> bytes:
    return hashlib.sha256(page.to_bytes(8, "little")).digest()


class Written:
    """Counts the bytes that are written to segments."""

    def __init__(self) -> None:
        self.nbytes = 0
        write = DiskFile.write

        def counted(file: DiskFile, pieces: Sequence[memoryview], offset: int) -> None:
            self.nbytes += sum(map(len, pieces))
            write(file, pieces, offset)

        DiskFile.write = counted  # type: ignore[assignment, method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, nargs="?", help="JSON lines, gzipped, with hash_ids")
    parser.add_argument("--requests", type=int, default=12_031)
    parser.add_argument("--share", type=float, default=0.1, help="of the bytes that are asked for")
    parser.add_argument("--payload", type=int, default=BLOCK_NBYTES, help="bytes of a page")
    given = parser.parse_args()
    if given.trace is None:
        print("skipped: give a trace")
        return
    chains = list(conversations(given.trace, given.requests))
    parents: dict[int, int | None] = {}
    for chain in chains:
        parents.update(zip(chain, [None, *chain]))
    record = BLOCK_NBYTES + given.payload
    capacity = int(len(parents) * record * given.share)
    payload, header = aligned(given.payload), memoryview(bytearray(256))
    written, asked, begun = Written(), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        options = FileOptions.model_validate({"capacity": capacity, "refresh_s": 3600})
        store = FileBackend(Path(directory), options)
        exact: LeafLru | None = None
        shares = []
        for number, chain in enumerate(chains, 1):
            keys = [key(page) for page in chain]
            there = list(store.exists(keys))
            missing = [each for each, known in zip(keys, there) if not known]
            for first in range(0, len(missing), BATCH):
                some = missing[first : first + BATCH]
                store.set_from(some, [Value(header, payload)] * len(some), 60.0)
            asked += len(missing) * record
            store.touch(keys[::-1])
            if exact is None and store.counters.snapshot().get("evicted"):
                exact = LeafLru(store.stats().n_records)
                for earlier in chains[: number - 1]:
                    exact.use(earlier)
            if exact is not None:
                exact.use(chain)
                if number % (len(chains) // SAMPLES) == 0:
                    entries = store._catalog.entries
                    mine = usable({page for page in parents if key(page) in entries}, parents)
                    best = len(exact.used)
                    shares.append(mine / best)
                    print(f"{number:6} requests: {mine:6} of {best:6} usable ({mine / best:.3f})")
        store.close()
    seconds = time.monotonic() - begun
    print(f"{len(parents):,} pages of {record:,} bytes; a store of {capacity:,}; {seconds:.0f} s")
    print(f"usable leading pages over exact leaf-LRU: {min(shares):.3f} to {max(shares):.3f}")
    print(f"bytes written over bytes asked: {written.nbytes / asked:.3f}")


if __name__ == "__main__":
    main()
