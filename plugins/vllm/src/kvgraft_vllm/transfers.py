"""Chunks between the engine's memory and the store, as jobs of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvgraft.storage import Address, Completions, Status, Storage, StorageTicket

__all__ = ["FinishedJob", "Job", "Transfers"]


@dataclass(frozen=True, slots=True)
class Job:
    """A job of vLLM on its way; tag of its ticket.

    Attributes:
        number: vLLM's.
        keys: the chunks'.
        loads: whether it goes to the engine.
        begun: when it was submitted.
        request: whose.
        end_tokens: per key, the end of its chunk in the request's tokens; empty if not known.
    """

    number: int
    keys: tuple[bytes, ...]
    loads: bool
    begun: float
    request: str = ""
    end_tokens: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job that has ended; its memory is the engine's again.

    Attributes:
        job: which.
        statuses: of its keys.
        nbytes: bytes that were moved.
        seconds: since it was submitted.
    """

    job: Job
    statuses: tuple[Status, ...]
    nbytes: int
    seconds: float

    @property
    def ok_keys(self) -> tuple[bytes, ...]:
        """Chunks that arrived."""
        return tuple(
            key for key, status in zip(self.job.keys, self.statuses) if status is Status.OK
        )

    @property
    def success(self) -> bool:
        """Whether all of them did."""
        return all(status is Status.OK for status in self.statuses)


class Transfers:
    """Jobs on their way.

    Args:
        storage: the store.
        done: gets the tickets.
        address: the address of a key.
        memory: bytes of the engine's CPU memory, flat and writable.
        chunk_nbytes: bytes of one chunk there.
        store_limit_nbytes: most bytes on their way to the store.
        clock: seconds that only grow.
    """

    def __init__(
        self,
        storage: Storage,
        done: Completions,
        address: Callable[[bytes], Address],
        memory: memoryview,
        chunk_nbytes: int,
        store_limit_nbytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._storage = storage
        self._done = done
        self._address = address
        self._memory: memoryview | None = memory
        self._chunk_nbytes = chunk_nbytes
        self._store_limit_nbytes = store_limit_nbytes
        self._clock = clock
        self._on_their_way: dict[int, tuple[Job, StorageTicket]] = {}
        self._finished: list[FinishedJob] = []
        self.storing_nbytes = 0
        self.loading_nbytes = 0
        self.n_chunks_refused = 0

    def load(
        self,
        number: int,
        keys: Iterable[bytes],
        chunks: Iterable[int],
        request: str = "",
        end_tokens: Iterable[int | None] = (),
    ) -> None:
        """Fetch chunks into places of the engine's memory."""
        job = Job(number, tuple(keys), True, self._clock(), request, tuple(end_tokens))
        self.loading_nbytes += self._nbytes(job)
        self._watch(job, self._storage.get(self._addresses(job), self._rows(chunks)))

    def store(self, number: int, keys: Iterable[bytes], chunks: Iterable[int]) -> None:
        """Store chunks from places of the engine's memory, unless too much is on its way."""
        job = Job(number, tuple(keys), False, self._clock())
        nbytes = self._nbytes(job)
        if self.storing_nbytes and self.storing_nbytes + nbytes > self._store_limit_nbytes:
            self.n_chunks_refused += len(job.keys)
            self._finished.append(FinishedJob(job, (Status.FULL,) * len(job.keys), 0, 0.0))
            return
        self.storing_nbytes += nbytes
        ticket = self._storage.set(self._addresses(job), self._rows(chunks), only_missing=True)
        self._watch(job, ticket)

    def settle(self, job: Job, ticket: StorageTicket) -> FinishedJob:
        """Take what came of a job."""
        del self._on_their_way[job.number]
        nbytes = self._nbytes(job)
        if job.loads:
            self.loading_nbytes -= nbytes
        else:
            self.storing_nbytes -= nbytes
        statuses = tuple(status or Status.DOWN for status in ticket.statuses)
        moved = sum(status is Status.OK for status in statuses) * self._chunk_nbytes
        finished = FinishedJob(job, statuses, moved, self._clock() - job.begun)
        self._finished.append(finished)
        return finished

    def take(self) -> list[FinishedJob]:
        """Jobs that ended since the last call, each once."""
        taken, self._finished = self._finished, []
        return taken

    def cancel(self) -> None:
        """Give up everything on its way; it ends as soon as nothing touches its memory."""
        for _, ticket in self._on_their_way.values():
            ticket.cancel()

    def let_go(self) -> None:
        """Hold no view of the engine's memory any more."""
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    @property
    def n_jobs(self) -> int:
        """Jobs on their way."""
        return len(self._on_their_way)

    def _watch(self, job: Job, ticket: StorageTicket) -> None:
        self._on_their_way[job.number] = job, ticket
        self._done.watch(ticket, job)

    def _addresses(self, job: Job) -> list[Address]:
        return [self._address(key) for key in job.keys]

    def _rows(self, chunks: Iterable[int]) -> Sequence[memoryview]:
        memory, size = self._memory, self._chunk_nbytes
        if memory is None:
            raise RuntimeError("kvgraft-vllm: a job was submitted after shutdown")
        return [memory[int(chunk) * size : (int(chunk) + 1) * size] for chunk in chunks]

    def _nbytes(self, job: Job) -> int:
        return len(job.keys) * self._chunk_nbytes
