"""Chunks between the engine's memory and the store, as jobs of vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvgraft_storage import Status, StorageTicket
from kvgraft_vllm.link import StoreLink

__all__ = ["FinishedJob", "Job", "Transfers"]


@dataclass(frozen=True, slots=True)
class Job:
    """A job of vLLM in flight; the tag of its ticket.

    Attributes:
        number: vLLM's job id.
        keys: the chunks' keys.
        loads: whether it goes to the engine.
        begun: when it was submitted.
        request: the request that it is for.
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
    """A job that has ended; the engine may use its memory again.

    Attributes:
        job: the job.
        statuses: statuses of its keys.
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
        """Whether all chunks arrived."""
        return all(status is Status.OK for status in self.statuses)


class Transfers:
    """Jobs on their way.

    Args:
        link: the store.
        memory: bytes of the engine's CPU memory, flat and writable.
        chunk_nbytes: bytes of one chunk there.
        store_limit_nbytes: most bytes on their way to the store.
    """

    def __init__(
        self, link: StoreLink, memory: memoryview, chunk_nbytes: int, store_limit_nbytes: int
    ) -> None:
        self._link = link
        self._memory: memoryview | None = memory
        self._chunk_nbytes = chunk_nbytes
        self._store_limit_nbytes = store_limit_nbytes
        self._on_their_way: dict[int, tuple[Job, StorageTicket]] = {}
        self._finished: list[FinishedJob] = []
        self.storing_nbytes = 0
        self.loading_nbytes = 0
        self.n_chunks_refused = 0

    def load(self, job: Job, chunks: Iterable[int]) -> None:
        """Fetch a job's chunks into places of the engine's memory."""
        self.loading_nbytes += self._nbytes(job)
        rows = self._rows(chunks)
        self._watch(job, self._link.storage.get(self._link.addresses(job.keys), rows))

    def store(self, job: Job, chunks: Iterable[int]) -> None:
        """Store a job's chunks from the engine's memory, unless too many bytes are in flight."""
        nbytes = self._nbytes(job)
        if self.storing_nbytes and self.storing_nbytes + nbytes > self._store_limit_nbytes:
            self.n_chunks_refused += len(job.keys)
            self._finished.append(FinishedJob(job, (Status.FULL,) * len(job.keys), 0, 0.0))
            return
        self.storing_nbytes += nbytes
        addresses, rows = self._link.addresses(job.keys), self._rows(chunks)
        self._watch(job, self._link.storage.set(addresses, rows, only_missing=True))

    def settle(self, job: Job, ticket: StorageTicket) -> FinishedJob:
        """Record the result of a job."""
        del self._on_their_way[job.number]
        nbytes = self._nbytes(job)
        if job.loads:
            self.loading_nbytes -= nbytes
        else:
            self.storing_nbytes -= nbytes
        statuses = tuple(status or Status.DOWN for status in ticket.statuses)
        moved = sum(status is Status.OK for status in statuses) * self._chunk_nbytes
        finished = FinishedJob(job, statuses, moved, self._link.clock() - job.begun)
        self._finished.append(finished)
        return finished

    def take(self) -> list[FinishedJob]:
        """Jobs that ended since the last call, each once."""
        taken, self._finished = self._finished, []
        return taken

    def cancel(self) -> None:
        """Cancel all jobs; each ends as soon as nothing accesses its memory."""
        for _, ticket in self._on_their_way.values():
            ticket.cancel()

    def let_go(self) -> None:
        """Release all views of the engine's memory."""
        if self._memory is not None:
            self._memory.release()
            self._memory = None

    @property
    def n_jobs(self) -> int:
        """Jobs on their way."""
        return len(self._on_their_way)

    def _watch(self, job: Job, ticket: StorageTicket) -> None:
        self._on_their_way[job.number] = job, ticket
        self._link.done.watch(ticket, job)

    def _rows(self, chunks: Iterable[int]) -> Sequence[memoryview]:
        memory, size = self._memory, self._chunk_nbytes
        if memory is None:
            raise RuntimeError("kvgraft-vllm: a job was submitted after shutdown")
        return [memory[int(chunk) * size : (int(chunk) + 1) * size] for chunk in chunks]

    def _nbytes(self, job: Job) -> int:
        return len(job.keys) * self._chunk_nbytes
