"""Requests between their arrival and the waiting line, while STORAGE is asked for their prefix.

They are not in the line yet: they neither hold up others nor count as overtaken.
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
"""Pause between two looks where nothing else is to be done."""


class Fetching:
    """Prefetches of a replay's requests; without a storage tier everyone passes through.

    Under `wait-complete` each step waits for the store, so that a replay does not depend on how
    fast it is. The other policies are about just that: the store works beside the virtual clock,
    and results differ from run to run.

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
        """Whether something is on its way to the store or from it."""
        return bool(self.cache.storage and self.cache.storage.n_in_flight)

    def enter(self, job: Job) -> None:
        """A request arrived: look for its prefix."""
        self._start(job)
        self._jobs.append(job)

    def leave(self) -> list[Job]:
        """Those that may stand in line now, in order of arrival."""
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
        """A request stays in line; pages of its prefix lost on HOST are fetched again."""
        if request.limited is None and request.anchor_tokens < job.resumable_tokens:
            self._start(job)

    def settle(self) -> None:
        """Take in finished work: all copies, and the store's calls as the policy says."""
        if self._waits:
            self.cache.drain()
        else:
            self.cache.journal.drain(self.cache.config.transfer_timeout_s)
        self.cache.poll()

    def wait(self) -> None:
        """Nothing else is to be done: wait for one that may leave. The virtual clock stands."""
        while not any(job.prefetch is None or job.prefetch.ready for job in self._jobs):
            time.sleep(STEP_S)
            self.cache.poll()

    def _start(self, job: Job) -> None:
        if self.cache.storage:
            job.prefetch = self.meter.run(
                "prefetch", job.trace.index, self.cache.storage.prefetch, job.key
            )
