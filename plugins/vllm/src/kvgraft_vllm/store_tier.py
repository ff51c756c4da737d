"""The tier without vLLM: keys in, statuses out. Nothing here blocks but `drain` and `close`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from kvgraft.storage import Address, Completions, Status, Storage, StorageBackend
from kvgraft_vllm.identity import Engine, group_name
from kvgraft_vllm.lookups import AskedKeys, Lookups
from kvgraft_vllm.settings import TierSettings
from kvgraft_vllm.transfers import FinishedJob, Job, Transfers

__all__ = ["StoreTier", "split_key"]

GROUP_NBYTES = 4
"""Bytes of the group's number behind the block hash in a key of vLLM, big-endian."""

STEP_S = 0.05
"""Longest wait between two looks at the clock while draining."""


class StoreTier:
    """A store below an engine's CPU memory.

    Keys are vLLM's: a block hash and four bytes of group number. One call at a time, of any thread.

    Args:
        engine: whose data it is.
        settings: bounds.
        backend: the store, open; closed by `close`.
        memory: the engine's CPU memory, chunk behind chunk.
        clock: seconds that only grow.

    Attributes:
        storage: the store under supervision.
    """

    def __init__(
        self,
        engine: Engine,
        settings: TierSettings,
        backend: StorageBackend,
        memory: memoryview,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.storage = Storage(engine.fingerprint, backend, settings.limits, clock)
        self._clock = clock
        self._done: Completions = self.storage.completions()
        self._lookups = Lookups(
            self.storage, self._done, self._address, settings.lookup_timeout_s, clock
        )
        self._transfers = Transfers(
            self.storage,
            self._done,
            self._address,
            memory.cast("B"),
            engine.chunk_nbytes,
            settings.store_nbytes,
            clock,
        )

    def lookup(self, key: bytes, request: str) -> Status | None:
        """Whether the store has a chunk (OK), or why not; None: ask again in the next step."""
        self.poll()
        return self._lookups.ask(key, request)

    def load(self, number: int, keys: Iterable[bytes], chunks: Iterable[int]) -> None:
        """Submit a job that fetches chunks into places of the CPU memory."""
        self._transfers.load(number, keys, chunks)

    def store(self, number: int, keys: Iterable[bytes], chunks: Iterable[int]) -> None:
        """Submit a job that stores chunks from places of the CPU memory."""
        self._transfers.store(number, keys, chunks)

    def take_finished(self) -> list[FinishedJob]:
        """Jobs that ended since the last call, each once."""
        self.poll()
        return self._transfers.take()

    def end_step(self) -> None:
        """Ask the store what this step wants to know."""
        self._lookups.flush()
        self.poll()

    def finish_request(self, request: str) -> None:
        """Forget a request."""
        self._lookups.forget(request)

    def poll(self) -> None:
        """Take what has ended; never blocks."""
        for ticket in self._done.take():
            if isinstance(ticket.tag, AskedKeys):
                self._lookups.settle(ticket.tag, ticket)
            elif isinstance(ticket.tag, Job):
                finished = self._transfers.settle(ticket.tag, ticket)
                if finished.job.loads and not finished.success:
                    self._lookups.correct(finished.job.keys, finished.statuses)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is on its way; those left at the time-out are given up.

        Returns:
            Whether all ended by themselves.
        """
        end = self._clock() + timeout_s
        if self._wait_until(end):
            return True
        self._transfers.cancel()
        self._wait_until(float("inf"))
        return False

    def _wait_until(self, end: float) -> bool:
        while True:
            self.poll()
            if not self._transfers.n_jobs:
                return True
            if self._clock() >= end:
                return False
            self._done.wait(STEP_S)

    def close(self) -> bool:
        """Store what is on its way, close the store and let go of the memory; bounded.

        Returns:
            Whether everything ended in time.
        """
        drained = self.drain(self.settings.shutdown_s)
        self._transfers.let_go()
        closed = self.storage.close(self.settings.shutdown_s)
        self._done.close()
        return drained and closed

    def _address(self, key: bytes) -> Address:
        block_hash, group = split_key(key)
        return self.storage.address(block_hash, group_name(group))


def split_key(key: bytes) -> tuple[bytes, int]:
    """The block hash and the group's number of a key of vLLM."""
    return bytes(key[:-GROUP_NBYTES]), int.from_bytes(key[-GROUP_NBYTES:], "big")
