"""One request of a workload in the cache, and the replay's substitute for the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvgraft.tree.keys import TokenKey
from kvgraft.types import Span
from kvgraft_replay.meter import Meter
from kvgraft_replay.payload import PageDigests, Pool, Verify, matching_rows, read_rows, write_rows
from kvgraft_replay.workload import TraceRequest

if TYPE_CHECKING:
    from kvgraft.cache import Cache
    from kvgraft.requests.request import Request
    from kvgraft_replay.hits import Hits
    from kvgraft_scheduling.waiting import WaitingPlace
    from kvgraft_storage.tier import Prefetch

__all__ = ["Checks", "Job", "Player"]

NOTHING = Span(0, 0)

SAMPLE_EVERY = 16
"""With `--verify sampled`, one slot in this many is compared."""


@dataclass(slots=True)
class Checks:
    """Counts of verification."""

    verified: int = 0
    mismatches: int = 0
    first: str = ""


@dataclass(slots=True, eq=False)
class Job:
    """A workload's request and its state.

    Attributes:
        decoded: output tokens computed so far.
        credit: virtual decode tokens earned and not used yet, less than one.
        held: output tokens decoded inside a page, without a call of `computed` yet.
        hits: tokens of its first match, by tier, that it never computed.
        computed: ranges of positions that it computed.
        unserved: whether it ended without all of its output.
        left: its former place in the queue.
        announcement: of its prefix while it waits.
        prefetch: its prefetch from STORAGE until it begins.
        fetched: pages that its last successful prefetch made resumable.
        resumable_tokens: resumable tokens when its last prefetch ended.
    """

    trace: TraceRequest
    tokens: npt.NDArray[np.int32]
    digests: PageDigests
    key: TokenKey
    request: Request | None = None
    decoded: int = 0
    credit: float = 0.0
    held: int = 0
    hits: Hits | None = None
    computed: Span = NOTHING
    unserved: bool = False
    left: WaitingPlace[Job] | None = None
    announcement: Any = None
    prefetch: Prefetch | None = None
    fetched: Span = NOTHING
    resumable_tokens: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def running(self) -> Request:
        """The cache's request; only while it runs."""
        assert self.request is not None
        return self.request

    @property
    def place(self) -> WaitingPlace[Job]:
        """Its former place in the queue; only after it left."""
        assert self.left is not None
        return self.left

    @property
    def length(self) -> int:
        """Tokens of prompt and output."""
        return len(self.tokens)


class Player:
    """Replaces the model: stamps computed tokens, and verifies reused ones."""

    def __init__(self, cache: Cache, meter: Meter, verify: Verify, seed: int) -> None:
        self.cache = cache
        self.meter = meter
        self.verify = verify
        self.checks = Checks()
        self._random = np.random.default_rng(seed)

    def job(self, trace: TraceRequest) -> Job:
        """Build a request's tokens, digests and key."""
        tokens = trace.token_ids()
        digests = PageDigests(tokens, self.cache.config.page_size)
        prompt = tokens[: trace.prompt_tokens]
        key = self.meter.run("key", trace.index, TokenKey, prompt, trace.namespace)
        return Job(trace, tokens, digests, key)

    def compute(self, job: Job, n_tokens: int) -> bool:
        """Allocate and compute the next tokens; False if the cache has no room for them."""
        request, cache = job.running, self.cache
        start = request.computed
        if not self.meter.run("allocate", job.trace.index, cache.allocate, request, n_tokens):
            return False
        self._stamp(job, start, start + n_tokens)
        self.meter.run("computed", job.trace.index, cache.computed, request, n_tokens)
        return True

    def _stamp(self, job: Job, start: int, end: int) -> None:
        """Stamp the pages completed by tokens `[start, end)`, and states at page boundaries.

        Nothing else can be shared, so nothing else is read.
        """
        page_size = self.cache.config.page_size
        first, last = start // page_size, end // page_size
        if self.verify is Verify.OFF or first == last:
            return
        for each, component in zip(self.cache.mounted, self.cache.tree.components):
            pool = each.component.device
            if component.is_state:
                if end % page_size:
                    continue
                slot = self.cache.state_slot(job.running, each.name)
                write_rows(pool, np.array([slot]), job.digests.state(end))
                continue
            for run in job.running.components[component.index].runs:
                low, high = max(first, run.first), min(last, run.end)
                if low >= high:
                    continue
                part = run.cut(low, high)
                stamps = np.repeat(job.digests.pages(low, high), component.slots_per_page)
                write_rows(pool, read_rows(part.device), stamps)
                if part.host is not None and each.component.host is not None:
                    write_rows(each.component.host, read_rows(part.host), stamps)

    def verify_prefix(self, job: Job) -> None:
        """Compare every slot that the request resumes from or holds with its stamp."""
        if self.verify is Verify.OFF:
            return
        request = job.running
        n_pages = request.computed // self.cache.config.page_size
        if not n_pages:
            return
        for each, component in zip(self.cache.mounted, self.cache.tree.components):
            if component.is_state:
                continue
            n_slots = n_pages * component.slots_per_page
            stamps = np.repeat(job.digests.pages(0, n_pages), component.slots_per_page)
            table = self.cache.table(request, each.name)[:n_slots]
            self._compare(job, each.name, each.component.device, table, stamps)
            if component.home_is_host and each.component.host is not None:
                table = self.cache.host_table(request, each.name)[:n_slots]
                self._compare(job, each.name, each.component.host, table, stamps)

    def verify_states(self, job: Job) -> None:
        """Compare the states that a request got with its exact token count."""
        if self.verify is Verify.OFF:
            return
        request = job.running
        for each, component in zip(self.cache.mounted, self.cache.tree.components):
            if component.is_state and request.computed:
                slot = np.array([self.cache.state_slot(request, each.name)], dtype=np.int32)
                stamp = job.digests.state(request.computed)
                self._compare(job, each.name, each.component.device, slot, stamp)

    def _compare(
        self,
        job: Job,
        component: str,
        pool: Pool,
        table: npt.NDArray[np.int32],
        stamps: npt.NDArray[np.int64],
    ) -> None:
        positions = np.flatnonzero(table >= 0)
        if self.verify is Verify.SAMPLED and len(positions) > 1:
            count = max(1, len(positions) // SAMPLE_EVERY)
            positions = self._random.choice(positions, count, replace=False)
        if not len(positions):
            return
        slots = table[positions].astype(np.int64)
        good = matching_rows(pool, slots, stamps[positions])
        self.checks.verified += len(positions)
        wrong = len(positions) - good
        if wrong:
            self.checks.mismatches += wrong
            self.checks.first = self.checks.first or (
                f"request {job.trace.index}, component {component!r}: {wrong} of "
                f"{len(positions)} slots hold other bytes"
            )
