"""Settings and counts of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from kvgraft import SettingsModel

__all__ = ["EngineSettings", "EngineTotals"]


class EngineSettings(SettingsModel):
    """Limits of one engine.

    Attributes:
        max_running: most requests that hold memory at a time; at most the cache's `max_requests`,
            if given.
        chunk_tokens: prompt tokens of one request that admission promises for a pass; a pass takes
            more, up to `step_tokens`, if the pools have room.
        step_tokens: most tokens over all requests in one step.
        reserve_tokens: decode tokens promised at admission; beyond them a request may be retracted.
        max_deferrals: most steps that a request waits while a running one computes pages that it
            would resume from; with 0 each computes its own.
        max_drafts: most drafts of a request that a pass verifies, found by prompt lookup; 0 for
            none. No more than the `max_drafts` of the cache.
    """

    max_running: PositiveInt = 16
    chunk_tokens: PositiveInt = 512
    step_tokens: PositiveInt = 2048
    reserve_tokens: PositiveInt = 64
    max_deferrals: NonNegativeInt = 256
    max_drafts: NonNegativeInt = 0


@dataclass(slots=True)
class EngineTotals:
    """Counts since the engine was opened.

    Attributes:
        requests: submitted requests.
        finished: ended by a stop token or their length.
        aborted: aborted by the caller.
        failed: ended by a failure of the model or a copy.
        rejected: too large for the pools.
        prompt_tokens: prompt tokens of requests that were admitted at least once.
        cached_tokens: prompt tokens that were not computed.
        host_tokens: cached tokens that came from the host.
        storage_tokens: host tokens that were prefetched from storage for their request.
        computed_tokens: through the model; recomputed ones and rejected drafts included.
        generated_tokens: output tokens.
        draft_tokens: drafts that were verified.
        accepted_tokens: those of them that were produced.
        admissions: admitted sessions.
        deferrals: how often a request did not fit yet.
        retractions: how often a running request was retracted.
        followers: requests that waited while another computed their prefix.
        passes: forward passes.
        rows: sequences in the passes; `rows / passes` is the mean batch size.
        rows_moved: for a sparse model, rows fetched from the host, over all layers.
        rows_dense: rows that attention over all tokens would have fetched.
    """

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_tokens: int = 0
    storage_tokens: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    admissions: int = 0
    deferrals: int = 0
    retractions: int = 0
    followers: int = 0
    passes: int = 0
    rows: int = 0
    rows_moved: int = 0
    rows_dense: int = 0
