"""A replay's totals: each request counts with its final outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgraft.types import Span
from kvgraft_replay.hits import Hits
from kvgraft_replay.report.schema import NamespaceCounts
from kvgraft_replay.running import Job

__all__ = ["Totals"]


@dataclass(slots=True)
class Totals:
    """Totals so far.

    Attributes:
        requests: requests that were admitted or rejected, each once.
        served: requests that ended with all of their output.
        input_tokens: prompt tokens of all requests.
        output_tokens: output tokens of served requests. device_hits, host_hits, storage_hits:
        prompt tokens that a request never computed.
        unserved_tokens: prompt tokens of requests that were rejected or ran out of memory.
        recomputed_tokens: tokens that a request computed again after a retraction.
        computed: prompt tokens that each served request computed.
        by_namespace: per namespace its requests, their prompt tokens and their hits.
    """

    requests: int = 0
    served: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    unserved_tokens: int = 0
    recomputed_tokens: int = 0
    device_hits: int = 0
    host_hits: int = 0
    storage_hits: int = 0
    admissions: int = 0
    deferrals: int = 0
    retractions: int = 0
    rejections: int = 0
    out_of_memory: int = 0
    ledger_violations: int = 0
    first_problem: str = ""
    first_rejection: str = ""
    computed: list[int] = field(default_factory=list)
    by_namespace: dict[str, NamespaceCounts] = field(default_factory=dict)

    @property
    def computed_p90(self) -> int:
        """Nine of ten served requests computed no more prompt tokens."""
        ordered = sorted(self.computed)
        return ordered[-(-9 * len(ordered) // 10) - 1] if ordered else 0

    @property
    def hits(self) -> int:
        """Input tokens that were not computed."""
        return self.device_hits + self.host_hits + self.storage_hits

    def count(self, job: Job) -> None:
        """A request is admitted or rejected for the first time."""
        self.requests += 1
        self.input_tokens += job.trace.prompt_tokens
        own = self._own(job)
        if own is not None:
            own["requests"] += 1
            own["input_tokens"] += job.trace.prompt_tokens

    def _own(self, job: Job) -> NamespaceCounts | None:
        """The counts of the request's namespace; None if it is in none."""
        namespace = job.trace.namespace
        if namespace is None:
            return None
        return self.by_namespace.setdefault(
            namespace, {"requests": 0, "input_tokens": 0, "saved_tokens": 0}
        )

    def count_hits(self, job: Job, hits: Hits) -> None:
        """From now on these are the request's hits."""
        before = job.hits if job.hits is not None else hits.at_most(0)
        self.device_hits += hits.device - before.device
        self.host_hits += hits.host - before.host
        self.storage_hits += hits.storage - before.storage
        own = self._own(job)
        if own is not None:
            own["saved_tokens"] += hits.tokens - before.tokens
        job.hits = hits

    def count_retracted(self, job: Job) -> None:
        """A running request is about to be retracted."""
        self.retractions += 1
        started, end = job.running.anchor_tokens, job.running.computed
        if job.computed.end:
            started = min(started, job.computed.start)
        job.computed = Span(started, max(end, job.computed.end))

    def count_again(self, job: Job, anchor: int) -> None:
        """A request is admitted again: tokens it must compute now were not saved."""
        self.recomputed_tokens += max(0, job.computed.end - max(anchor, job.computed.start))
        if job.hits is not None and anchor < job.hits.tokens:
            self.count_hits(job, job.hits.at_most(anchor))

    def count_unserved(self, job: Job) -> None:
        """A request ends without being served: nothing of its prompt was saved."""
        job.unserved = True
        self.unserved_tokens += job.trace.prompt_tokens
        if job.hits is None:
            self.count(job)
        else:
            self.count_hits(job, job.hits.at_most(0))
