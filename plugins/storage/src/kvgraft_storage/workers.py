"""Threads that make a backend's calls, and are abandoned when a call does not return."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvgraft_storage.backend import Value
from kvgraft_storage.fair_queue import Call, FairQueue, Task
from kvgraft_storage.memory import aligned, round_up
from kvgraft_storage.payload import HEADER_NBYTES
from kvgraft_storage.ticket import Job, Phase

__all__ = ["Staging", "WorkerPool"]


class Staging:
    """A worker's own memory, for backends that are not synchronous.

    A hanging call keeps it, so a backend's late writes cannot reach a caller's memory.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = aligned(nbytes)  # untouched pages cost nothing

    def values(self, nbytes: Sequence[int]) -> list[Value]:
        """Memory for payloads of these lengths, each at a block; headers are zero.

        A length of 0 gives a header only.
        """
        headers = round_up(HEADER_NBYTES * len(nbytes))
        needed = headers + sum(round_up(each) for each in nbytes)
        if needed > len(self._memory):
            self._memory = aligned(needed)
        memory, values, start = self._memory, [], headers
        memory[:headers] = bytes(headers)
        for number, length in enumerate(nbytes):
            header = memory[number * HEADER_NBYTES : (number + 1) * HEADER_NBYTES]
            values.append(Value(header, memory[start : start + length]))
            start += round_up(length)
        return values


class _Worker:
    """One thread; `job` is its current job."""

    __slots__ = ("abandoned", "job", "thread")

    def __init__(self) -> None:
        self.job: Job | None = None
        self.abandoned = False
        self.thread: threading.Thread | None = None


class WorkerPool:
    """Runs the calls of a fair queue, on a bounded number of threads.

    Args:
        queue: where calls wait.
        bind: returns the function that runs a call.
        n_workers: threads that work.
        max_abandoned: additional threads that may hang in a call; beyond that a hung one is not
            replaced.
        staging_nbytes: memory per worker, to begin with.
    """

    def __init__(
        self,
        queue: FairQueue,
        bind: Callable[[Job, Call], Task],
        n_workers: int,
        max_abandoned: int,
        staging_nbytes: int,
    ) -> None:
        self._queue = queue
        self._bind = bind
        self._n_workers = n_workers
        self._max_abandoned = max_abandoned
        self._staging_nbytes = staging_nbytes
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._hung: set[_Worker] = set()
        self._closed = False
        for _ in range(n_workers):
            self._start()

    @property
    def n_live(self) -> int:
        """Workers that take tasks."""
        return len(self._workers)

    @property
    def n_abandoned(self) -> int:
        """Threads that hang in a call."""
        return len(self._hung)

    def abandon(self, job: Job) -> bool:
        """Abandon the worker of a job, and start another one if allowed.

        Returns:
            Whether there was one.
        """
        with self._lock:
            for worker in self._workers:
                if worker.job is job:
                    break
            else:
                return False
            worker.abandoned = True
            self._workers.discard(worker)
            self._hung.add(worker)
            replace = not self._closed and len(self._hung) <= self._max_abandoned
        if replace:
            self._start()
        return True

    def close(self) -> None:
        """Let every worker end after the queued calls; does not wait."""
        with self._lock:
            self._closed = True
            n_working = len(self._workers)
        self._queue.let_leave(n_working)

    def _start(self) -> None:
        worker = _Worker()
        worker.thread = threading.Thread(
            target=self._work, args=(worker,), name="kvgraft-storage", daemon=True
        )
        with self._lock:
            self._workers.add(worker)
        worker.thread.start()

    def _work(self, worker: _Worker) -> None:
        staging = Staging(self._staging_nbytes)
        while (item := self._queue.take(self._bind)) is not None:
            job, task = item
            worker.job = job
            task(staging)
            job.enter(Phase.RETURNED)
            self._queue.done(job)
            del item, job, task
            if not self._stays(worker):
                return
        with self._lock:
            self._workers.discard(worker)

    def _stays(self, worker: _Worker) -> bool:
        """After a job: whether a worker goes on; one left behind does if it is needed again."""
        with self._lock:
            worker.job = None
            if not worker.abandoned:
                return True
            self._hung.discard(worker)
            if self._closed or len(self._workers) >= self._n_workers:
                return False
            worker.abandoned = False
            self._workers.add(worker)
            return True
