"""Requests between arrival and queue, while their prefix is prefetched from STORAGE.

They are not in the queue yet, so they neither block others nor count as overtaken.
"""

from __future__ import annotations

import time

from kvgraft.cache import Cache
from kvgraft.requests.request import Request
from kvgraft.types import Span
from kvgraft_replay.meter import Meter
from kvgraft_replay.running import Job
from kvgraft_storage.settings import PrefetchPolicy

__all__ = ["Fetching"]

STEP_S = 0.002
"""Pause between two polls if there is nothing else to do."""


class Fetching:
    """Prefetches of a replay's requests; without a storage tier all requests pass through.

    Under `wait-complete` each step waits for the store, so a replay does not depend on its speed.
    The other policies do depend on it: the store works in real time, and results differ from run to
    run.

    Args:
        cache: the cache.
        meter: measures its calls.
    """

    def __init__(self, cache: Cache, meter: Meter) -> None:
        self.cache = cache
        self.meter = meter
        self._jobs: list[Job] = []
        storage = cache.config.storage
        self._waits = storage is None or storage.prefetch is PrefetchPolicy.WAIT_COMPLETE

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def busy(self) -> bool:
        """Whether operations of the store are in flight."""
        return bool(self.cache.storage and self.cache.storage.n_in_flight)

    def enter(self, job: Job) -> None:
        """A request arrived: prefetch its prefix."""
        self._start(job)
        self._jobs.append(job)

    def leave(self) -> list[Job]:
        """The requests that may enter the queue now, in order of arrival."""
        ready = [job for job in self._jobs if job.prefetch is None or job.prefetch.ready]
        self._jobs = [job for job in self._jobs if job not in ready]
        return ready

    def begin(self, job: Job, *, reserve: int, chunk: int) -> Request:
        """Begin a request with the pages that arrived for it."""
        prefetch, job.prefetch = job.prefetch, None
        request = self.cache.begin(job.key, reserve=reserve, chunk=chunk, prefetch=prefetch)
        if prefetch is not None:
            job.resumable_tokens = prefetch.tokens
            if prefetch.gained_tokens:
                size = self.cache.tree.page_size
                job.fetched = Span(prefetch.anchor_tokens // size, prefetch.tokens // size)
        return request

    def deferred(self, job: Job, request: Request) -> None:
        """A request stays in the queue; pages of its prefix that HOST lost are fetched again."""
        if request.limited is None and request.anchor_tokens < job.resumable_tokens:
            self._start(job)

    def settle(self) -> None:
        """Process finished work: all copies, and the store's calls as the policy says."""
        if self._waits:
            self.cache.drain()
        else:
            self.cache.journal.drain(self.cache.config.transfer_timeout_s)
        self.cache.poll()

    def wait(self) -> None:
        """Nothing else is to do: wait until a request may leave; the virtual clock stops."""
        while not any(job.prefetch is None or job.prefetch.ready for job in self._jobs):
            time.sleep(STEP_S)
            self.cache.poll()

    def _start(self, job: Job) -> None:
        if self.cache.storage:
            job.prefetch = self.meter.run(
                "prefetch", job.trace.index, self.cache.storage.prefetch, job.key
            )
