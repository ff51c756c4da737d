"""A request to an engine, and its progress."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvgraft import Decision, Prefetch, TokenKey
from kvgraft_scheduling import WaitingPlace
from kvgraft_transformers.engine.sampling import Choice, Constraint, Sampler, Sampling
from kvgraft_transformers.engine.scoring import PromptScore
from kvgraft_transformers.session import Session

__all__ = ["FinishReason", "Generation", "GenerationRequest", "NewToken", "Work"]


class FinishReason(str, enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    """It produced a stop token."""
    LENGTH = "length"
    """It produced as many tokens as requested."""
    ABORTED = "aborted"
    """The caller aborted it."""
    FAILED = "failed"
    """The model or a copy failed; see `Generation.error`."""
    REJECTED = "rejected"
    """It never fits the pools; see `Generation.decision`."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request to an engine.

    Attributes:
        tokens: the prompt, at least one token.
        max_new_tokens: most tokens to produce, at least one.
        min_new_tokens: tokens to produce before one that ends it may be chosen; a constraint that
            allows no other token by then fails it.
        sampling: how tokens are sampled.
        stop_tokens: tokens that end it, besides the model's own.
        ignore_end: continue after the model's end-of-sequence token.
        namespace: separates requests that must not share cache.
        priority: requests with a lower number are admitted and computed first, and retracted last.
            They interrupt no pass, and no request is retracted to admit them.
        constraint: decides which tokens are allowed, for this request only.
        resume_at: tokens of the prompt after which other requests will differ, such as the end of a
            system prompt; they resume there from the second one on.
        hints: how its data is kept: the arguments `hint`, `priority` and `ttl_s` of `Cache.begin`.
        prompt_logprobs: how many most likely tokens to return at each position of the prompt, with
            the log-probabilities of the prompt's own; None for neither. The whole prompt is
            computed for them, without a hit.
    """

    tokens: Sequence[int]
    max_new_tokens: int = 16
    sampling: Sampling = field(default_factory=Sampling)
    stop_tokens: frozenset[int] = frozenset()
    ignore_end: bool = False
    namespace: object = None
    resume_at: int | Sequence[int] | None = ()
    priority: int = 0
    constraint: Constraint | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    min_new_tokens: int = 0
    prompt_logprobs: int | None = None


class NewToken(NamedTuple):
    """One token of a generation; the last one has the finish reason.

    Attributes:
        generation: whose.
        token: its id; None if the generation ended without one.
        finish: None while more may come.
        choice: the token with its log-probabilities; None if the generation ended without one.
    """

    generation: Generation
    token: int | None
    finish: FinishReason | None
    choice: Choice | None = None


class Generation:
    """The progress of a request in an engine.

    Attributes:
        request: the request.
        prompt_tokens: length of the prompt.
        tokens: tokens produced so far.
        finish: why it ended; None while it has not.
        cached_tokens: prompt tokens that were not computed, at its first match.
        host_tokens: cached tokens that came from the host.
        storage_tokens: host tokens that were prefetched from storage for it.
        prefetch: its prefetch from storage while it waits; None without one, and once it runs.
        place: its former place in the queue, once it has left it.
        retractions: how often it was retracted.
        decision: the last decision of admission.
        deferrals_left: steps that it may still wait for pages that another request computes.
        error: why it failed; None otherwise.
        submitted_at: the engine's clock at `submit`, in seconds.
        token_at: the same at its newest token; None before the first.
        misses: passes in a row that rejected all of their drafts.
        passes_to_skip: next passes without drafts.
        session: its session while it holds memory.
        score: the log-probabilities of its prompt; None if they are not asked for.
    """

    def __init__(
        self,
        request: GenerationRequest,
        device: str,
        submitted_at: float = 0.0,
        end_tokens: Iterable[int] = (),
    ) -> None:
        self.request = request
        self.submitted_at = submitted_at
        self.token_at: float | None = None
        self.key = TokenKey(list(request.tokens), namespace=request.namespace)
        self.prompt_tokens = self.key.n_tokens
        self.tokens: list[int] = []
        self.finish: FinishReason | None = None
        self.cached_tokens: int | None = None
        self.host_tokens = 0
        self.storage_tokens = 0
        self.prefetch: Prefetch | None = None
        self.place: WaitingPlace[Generation] | None = None
        self.retractions = 0
        self.decision: Decision | None = None
        self.deferrals_left: int | None = None
        self.error: Exception | None = None
        self.was_admitted = False
        self.misses = self.passes_to_skip = 0
        self.loading_since = 0.0
        self.session: Session | None = None
        self.score: PromptScore | None = None
        if request.prompt_logprobs is not None:
            self.score = PromptScore(request.tokens, request.prompt_logprobs)
        own = () if request.ignore_end else end_tokens
        self.sampler = Sampler(
            request.sampling,
            device,
            request.tokens,
            request.constraint,
            ends={*request.stop_tokens, *own},
            fewest=request.min_new_tokens,
        )

    @property
    def remaining(self) -> int:
        """Tokens it may still produce."""
        return self.request.max_new_tokens - len(self.tokens)

    @property
    def arrived(self) -> int:
        """Its place in the order of arrival, once it has left the queue."""
        assert self.place is not None
        return self.place.arrived

    @property
    def prefilled(self) -> bool:
        """Whether all but the newest token is computed."""
        if self.session is None:
            return False
        return self.session.computed >= max(self.session.request.prompt, self.prompt_tokens)

    @property
    def scores(self) -> bool:
        """Whether its next pass computes tokens of its prompt for their log-probabilities.

        Then its session was begun with a part of the prompt.
        """
        session = self.session
        began = session is not None and session.request.prompt < self.prompt_tokens
        return began and not self.prefilled

    def begin_to_score(self) -> int:
        """Cut its key to the tokens that nothing is to be hit behind; returns how many are left."""
        if self.score is None or self.score.ended:
            return 0
        self.key.truncate(self.score.n_known + 1)
        return self.prompt_tokens - self.key.n_tokens

    def go_on_to_score(self) -> None:
        """Its key has the whole prompt again."""
        if self.key.n_tokens < self.prompt_tokens:
            self.key.extend(self.request.tokens[self.key.n_tokens :])

    @property
    def n_computed(self) -> int:
        """Tokens whose data exists; it must hold memory."""
        assert self.session is not None
        return self.session.computed

    @property
    def n_known(self) -> int:
        """Tokens that are known and not computed; it must hold memory.

        The newest one. Behind a recurrent state that had drafts in it which were rejected, also
        those that were verified with them.
        """
        return self.key.n_tokens - self.n_computed

    def accept(self, token: int) -> FinishReason | None:
        """Append a new token; returns whether it is the last one."""
        self.key.extend([token])
        self.tokens.append(token)
        if token in self.request.stop_tokens or self.sampler.ended:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.remaining <= 0 else None


class Work(NamedTuple):
    """The tokens that a pass computes of one generation.

    Attributes:
        generation: whose.
        n_tokens: tokens, drafts included.
        drafts: the last ones of these; some may be padding.
        n_found: drafts that are no padding.
    """

    generation: Generation
    n_tokens: int
    drafts: tuple[int, ...] = ()
    n_found: int = 0
