"""The tier without vLLM: keys in, statuses out. Nothing here blocks but `drain` and `close`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from kvgraft import ConfigError
from kvgraft_storage import (
    Access,
    Address,
    BreakerState,
    Status,
    Storage,
    StorageBackend,
    StorageTicket,
)
from kvgraft_vllm.announcements import Announcements
from kvgraft_vllm.counts import Taken, Tally
from kvgraft_vllm.explanation import Explanations
from kvgraft_vllm.identity import Engine, group_name
from kvgraft_vllm.link import StoreLink
from kvgraft_vllm.lookups import AskedKeys, Lookups
from kvgraft_vllm.settings import TierSettings
from kvgraft_vllm.transfers import FinishedJob, Job, Transfers

__all__ = ["StoreTier", "split_key"]

logger = logging.getLogger("kvgraft.vllm")

GROUP_NBYTES = 4
"""Bytes of the group index behind the block hash in a vLLM key, big-endian."""

STATUSES = frozenset(status.value for status in Status)

STEP_S = 0.05
"""Longest wait between two looks at the clock while draining."""


class StoreTier:
    """A store below an engine's CPU memory.

    Keys are vLLM's: a block hash and four bytes of group index. Any thread may call, one at a time.

    Args:
        engine: the engine that owns the data.
        settings: time-outs and limits.
        backend: the store, open; closed by `close`.
        memory: the engine's CPU memory, chunk behind chunk.
        clock: monotonic, in seconds.

    Attributes:
        storage: the store under supervision.

    Raises:
        ConfigError: the store cannot take a chunk.
    """

    def __init__(
        self,
        engine: Engine,
        settings: TierSettings,
        backend: StorageBackend,
        memory: memoryview,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        longest = backend.capabilities.max_payload_nbytes
        if longest is not None and longest < engine.chunk_nbytes:
            backend.close()
            raise ConfigError(
                f"kvgraft-vllm: a chunk has {engine.chunk_nbytes} bytes, {settings.url} takes "
                f"{longest} at most; give it more (for file: capacity, segment), or smaller chunks "
                "(block_size in kv_connector_extra_config)"
            )
        self.engine = engine
        self.settings = settings
        self.storage = Storage(engine.fingerprint, backend, settings.limits, clock)
        link = StoreLink(self.storage, self.storage.completions(), self._address, clock)
        self._link = link
        self._lookups = Lookups(link, settings.lookup_timeout_s)
        self._transfers = Transfers(
            link, memory.cast("B"), engine.chunk_nbytes, settings.store_nbytes
        )
        self._used: dict[bytes, None] = {}
        self._touching: StorageTicket | None = None
        self._explanations = Explanations(engine)
        self._tally = Tally()
        self._announcements = (
            Announcements(self.storage.events()) if settings.enable_kv_events else None
        )

    def lookup(self, key: bytes, request: str, end_token: int | None = None) -> Status | None:
        """Whether the store has a chunk (OK), or why not; None: ask again in the next step.

        Args:
            key: the chunk's key.
            request: the request that asks.
            end_token: the end of the chunk in the request's tokens, if known.
        """
        status = self._lookups.ask(key, request)
        if status is not None:
            self._explanations.note(request, key, split_key(key)[1], end_token, status)
        if status is Status.OK:
            self._used[key] = None
        return status

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note a use of chunks on any tier; the store is notified when the step ends."""
        self._used.update(dict.fromkeys(keys))

    def load(
        self,
        number: int,
        keys: Iterable[bytes],
        chunks: Iterable[int],
        request: str = "",
        end_tokens: Iterable[int | None] = (),
    ) -> None:
        """Submit a job that fetches chunks into places of the CPU memory.

        Args:
            number: vLLM's job id.
            keys: the chunks' keys.
            chunks: their indices in the CPU memory.
            request: the request that loads them.
            end_tokens: the ends of the chunks in its tokens, if known.
        """
        begun = self._link.clock()
        job = Job(number, tuple(keys), True, begun, request, tuple(end_tokens))
        self._transfers.load(job, chunks)

    def store(self, number: int, keys: Iterable[bytes], chunks: Iterable[int]) -> None:
        """Submit a job that stores chunks from places of the CPU memory."""
        keys = tuple(keys)
        if self._announcements is not None:
            self._announcements.remember(keys, map(self._address, keys))
        self._transfers.store(Job(number, keys, False, self._link.clock()), chunks)

    def take_finished(self) -> list[FinishedJob]:
        """Jobs that ended since the last call, each once."""
        self.poll()
        return self._transfers.take()

    def end_step(self) -> None:
        """Send the lookups of this step to the store."""
        self._lookups.flush()
        self._tell_uses()
        self.poll()

    def _tell_uses(self) -> None:
        """Notify the store of uses, starts of prefixes last; skipped while the store is busy."""
        used, self._used = self._used, {}
        busy = self._touching is not None and not self._touching.done
        if used and self.storage.touches and not busy:
            addresses = self._link.addresses(reversed(used))
            self._touching = self.storage.touch(addresses, self.settings.lookup_timeout_s)

    def finish_request(self, request: str) -> None:
        """Log how much a request got, and forget it."""
        self._lookups.forget(request)
        told = self._explanations.finish(request)
        if told is None:
            return
        ending, line = told
        self._tally.add("kvgraft:hits_ended", str(ending.group), ending.status.value)
        if self.settings.log_requests:
            logger.info("kvgraft: %s", line)

    def take_metrics(self) -> Taken:
        """Numbers for /metrics since the last call; see `counts`."""
        for name, total in self.storage.counters.snapshot().items():
            verb, _, status = name.partition(".")
            if status in STATUSES:
                self._tally.set_total("kvgraft:chunks", verb, status, total=total)
        self._tally.set_total("kvgraft:chunks_refused", total=self._transfers.n_chunks_refused)
        gauges: dict[tuple[str, tuple[str, ...]], float] = {
            ("kvgraft:in_flight_bytes", ("store",)): self._transfers.storing_nbytes,
            ("kvgraft:in_flight_bytes", ("load",)): self._transfers.loading_nbytes,
            ("kvgraft:hanging_threads", ()): self.storage.n_abandoned,
        }
        for access in Access:
            up = self.storage.state_of(access) is not BreakerState.OPEN
            gauges["kvgraft:store_up", (access.value,)] = float(up)
        return Taken(self._tally.take(), gauges)

    def take_events(self) -> list[tuple[bool, list[bytes]]]:
        """Changes of the store in their order: whether keys were removed, and the keys."""
        return [] if self._announcements is None else self._announcements.take()

    def poll(self) -> None:
        """Process operations that have ended; never blocks."""
        for ticket in self._link.done.take():
            if isinstance(ticket.tag, AskedKeys):
                self._lookups.settle(ticket.tag, ticket)
            elif isinstance(ticket.tag, Job):
                finished = self._transfers.settle(ticket.tag, ticket)
                if finished.job.loads and not finished.success:
                    self._note_failures(finished)

    def _note_failures(self, finished: FinishedJob) -> None:
        job = finished.job
        ends = job.end_tokens or (None,) * len(job.keys)
        failed = [
            (split_key(key)[1], end, status)
            for key, end, status in zip(job.keys, ends, finished.statuses)
            if status is not Status.OK
        ]
        self._lookups.correct(job.keys, finished.statuses)
        self._explanations.note_failures(job.request, failed)
        for _, _, status in failed:
            self._tally.add("kvgraft:loads_failed", status.value)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no job is on its way; jobs left at the time-out are cancelled.

        Returns:
            Whether none was cancelled.
        """
        end = self._link.clock() + timeout_s
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
            if self._link.clock() >= end:
                return False
            self._link.done.wait(STEP_S)

    def close(self) -> bool:
        """Finish pending stores, close the store and release the memory, in bounded time.

        Returns:
            Whether everything ended in time.
        """
        drained = self.drain(self.settings.shutdown_s)
        self._transfers.let_go()
        closed = self.storage.close(self.settings.shutdown_s)
        self._link.done.close()
        return drained and closed

    def _address(self, key: bytes) -> Address:
        block_hash, group = split_key(key)
        return self.storage.address(block_hash, group_name(group))


def split_key(key: bytes) -> tuple[bytes, int]:
    """The block hash and the group index of a vLLM key."""
    return bytes(key[:-GROUP_NBYTES]), int.from_bytes(key[-GROUP_NBYTES:], "big")
