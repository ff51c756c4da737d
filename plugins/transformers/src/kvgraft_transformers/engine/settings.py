"""Settings and counts of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeInt, PositiveInt

from kvgraft import SettingsModel

__all__ = ["EngineSettings", "EngineTotals"]


class EngineSettings(SettingsModel):
    """Limits of one engine.

    Attributes:
        max_running: requests that hold memory at a time; no more than the `max_requests` of the
            cache, where that is given.
        chunk_tokens: prompt tokens of one request that admission promises for a pass; a pass takes
            more of them, up to `step_tokens`, where the pools have room.
        step_tokens: most tokens over all requests in one step.
        reserve_tokens: decode tokens promised at admission; beyond them a request may be retracted.
        max_deferrals: steps that a request waits, at most, while a running one computes pages that
            it would resume from; 0 lets each compute its own.
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
        requests: submitted.
        finished: ended by a stop token or their length.
        aborted: given up by the caller.
        failed: ended because the model or a copy failed.
        rejected: too large for the pools.
        prompt_tokens: of requests that were admitted at least once.
        cached_tokens: those of them that were not computed.
        host_tokens: those of them that came from the host.
        storage_tokens: those of these that storage brought there for their request.
        computed_tokens: through the model; recomputed ones and rejected drafts included.
        generated_tokens: produced.
        draft_tokens: drafts that were verified.
        accepted_tokens: those of them that were produced.
        admissions: sessions that were promised their slots.
        deferrals: times a request did not fit yet.
        retractions: times a running request made room.
        followers: requests that waited while another computed their prefix.
        passes: forward passes.
        rows: sequences in them, so that `rows / passes` is the mean batch.
        rows_moved: of a sparse model, rows fetched from the host, over all layers.
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
