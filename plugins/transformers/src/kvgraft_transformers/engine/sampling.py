"""Samples tokens from logits: greedy, or drawn after transformers' own warpers.

The order is vLLM's: penalties, the grammar, then temperature, `min_p`, `top_k` and `top_p`.
Log-probabilities are of the model's own logits, before all of these.

Rows of one pass are sampled together. Nothing is read back from the device until all tokens are
chosen, so the host waits for the device once per pass instead of once per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvgraft import SettingsModel

__all__ = ["Choice", "Constraint", "Sampler", "Sampling", "TokenLogprob", "choose"]

COLDEST = 1e-5
"""Lower temperatures would make logits infinite; they mean the most likely token."""


class Sampling(SettingsModel):
    """Settings for choosing the next token.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: draw among this many most likely tokens; 0 for all.
        top_p: draw among the fewest tokens whose probabilities add up to this much.
        min_p: draw among tokens at least this many times as likely as the most likely one.
        presence_penalty: subtracted from the logit of each token that was produced before.
        frequency_penalty: subtracted from it for each time it was produced.
        repetition_penalty: divides positive logits of tokens in the prompt or the output, and
            multiplies negative ones; 1 for none.
        seed: seed of the draws, as in torch; equal seeds and logits give equal tokens.
        logprobs: how many most likely tokens to return with their log-probabilities, beside the
            chosen one; 0 for the chosen one alone, None for none.
    """

    temperature: NonNegativeFloat = 0.0
    top_k: NonNegativeInt = 0
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    logprobs: NonNegativeInt | None = None


class TokenLogprob(NamedTuple):
    """A token and the logarithm of its probability, by the model's own logits."""

    token: int
    logprob: float


class Choice(NamedTuple):
    """A chosen token.

    Attributes:
        token: its id.
        logprob: the logarithm of its probability; None if not requested.
        top: the most likely tokens, best first; as many as requested.
    """

    token: int
    logprob: float | None = None
    top: tuple[TokenLogprob, ...] = ()


class Constraint(Protocol):
    """Decides which tokens may continue one answer, such as a grammar."""

    def allowed(self) -> torch.Tensor:
        """The allowed next tokens, `bool [n]` on the CPU; tokens from `n` on are not allowed."""

    def accept(self, token: int) -> None:
        """Note the chosen token."""

    @property
    def ended(self) -> bool:
        """Whether the answer is complete and must not continue."""


class Sampler:
    """Chooses the tokens of one request.

    Args:
        sampling: its settings.
        device: the device of the logits.
        prompt: the prompt's tokens, for `repetition_penalty`.
        constraint: this answer's constraint; None allows any token.
        ends: tokens that end the answer.
        fewest: tokens that it has before one of them may be chosen.
    """

    def __init__(
        self,
        sampling: Sampling,
        device: torch.device | str = "cpu",
        prompt: Sequence[int] = (),
        constraint: Constraint | None = None,
        ends: Iterable[int] = (),
        fewest: int = 0,
    ) -> None:
        self.sampling = sampling
        self._ends = list(ends)
        self._before_end = fewest if self._ends else 0
        self._constraint = constraint
        self._prompt = prompt
        self._penalties = _Penalties.of(sampling)
        self._warpers: Any = LogitsProcessorList()
        self._greedy = sampling.temperature < COLDEST
        if self._greedy:
            return
        self._generator = torch.Generator(device)
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        if sampling.temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.min_p:
            self._warpers.append(MinPLogitsWarper(sampling.min_p))
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))

    @property
    def ended(self) -> bool:
        """Whether the constraint allows no further token."""
        return self._constraint is not None and self._constraint.ended

    def pick(self, logits: torch.Tensor) -> Choice:
        """The next token, from logits `[vocabulary]`; later calls count it as produced.

        Raises:
            ValueError: logits are not numbers, or the constraint allows no token.
        """
        (choice,) = choose([self], logits[None])
        if isinstance(choice, Exception):
            raise choice
        return choice

    @property
    def is_plain(self) -> bool:
        """Whether it takes the token of the largest logit, independent of earlier tokens."""
        changed = self._penalties is not None or self._constraint is not None
        return self._greedy and not changed and not self._before_end

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """A token, int64 `[]`, on the device of logits `[vocabulary]`; -1 if none can be drawn.

        Raises:
            ValueError: the constraint allows no token.
        """
        scores = logits
        if self._penalties is not None:
            scores = self._penalties.apply(scores, self._prompt)
        if self._before_end:
            known = [token for token in self._ends if token < len(scores)]
            scores = scores.index_fill(0, torch.tensor(known, device=scores.device), -torch.inf)
        if self._constraint is not None:
            scores = _only(scores, self._constraint.allowed())
        if self._greedy:
            best = scores.max(dim=-1)
            return best.indices.masked_fill(best.values.isneginf(), -1)
        warped = self._warpers(None, scores[None].float())
        weights = torch.softmax(warped, dim=-1)[0]
        # weights that are not numbers raise on a CPU, and break a CUDA device for the whole process
        broken = weights.isnan().any()
        drawn = torch.multinomial(weights.masked_fill(broken, 1), 1, generator=self._generator)[0]
        return drawn.masked_fill(broken, -1)

    def count(self, token: int) -> None:
        """Count a produced token."""
        self._before_end = max(0, self._before_end - 1)
        if self._penalties is not None:
            self._penalties.count(token)
        if self._constraint is not None:
            self._constraint.accept(token)


def choose(samplers: Sequence[Sampler], logits: torch.Tensor) -> list[Choice | Exception]:
    """The next token of every row; later calls count it as produced.

    Args:
        samplers: one per row.
        logits: `[n_rows, vocabulary]`.

    Returns:
        For a row without a token, the reason: logits are not numbers, or its constraint allows no
        token.
    """
    best = logits.max(dim=-1)  # NaN counts as the largest
    tokens = best.indices
    errors: dict[int, Exception] = {}
    for row, sampler in enumerate(samplers):
        try:
            if not sampler.is_plain:
                tokens[row] = sampler.draw(logits[row])
        except Exception as error:  # noqa: BLE001 - of a caller's constraint, and of this row alone
            errors[row] = error
    tokens = tokens.masked_fill(best.values.isnan() | best.values.isneginf(), -1)
    likely = {
        row: _logprobs(logits[row], tokens[row : row + 1], sampler.sampling.logprobs)
        for row, sampler in enumerate(samplers)
        if sampler.sampling.logprobs is not None
    }
    # the only reads: tokens, and log-probabilities if requested
    read = iter(torch.cat([tokens, *(top for top, _ in likely.values())]).tolist())
    chosen = [next(read) for _ in samplers]
    logprobs = iter(torch.cat([each for _, each in likely.values()]).tolist() if likely else [])
    choices: list[Choice | Exception] = []
    for row, (sampler, token) in enumerate(zip(samplers, chosen)):
        choice = Choice(token)
        if row in likely:
            logprob, n_top = next(logprobs), len(likely[row][0])
            top = tuple(TokenLogprob(next(read), next(logprobs)) for _ in range(n_top))
            choice = Choice(token, logprob, top)
        if token < 0 and row not in errors:
            errors[row] = _no_token(logits[row])
        if row not in errors:
            try:
                sampler.count(token)
            except Exception as error:  # noqa: BLE001 - likewise
                errors[row] = error
        choices.append(errors.get(row, choice))
    return choices


class _Penalties:
    """Lowers the logits of earlier tokens.

    Args:
        sampling: the settings with the three penalties.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._produced: torch.Tensor | None = None  # times each token was, [vocabulary]
        self._seen: torch.Tensor | None = None  # in the prompt or produced, [vocabulary]

    @classmethod
    def of(cls, sampling: Sampling) -> _Penalties | None:
        """The penalties of these settings; None if they have none."""
        asked = sampling.presence_penalty or sampling.frequency_penalty
        return cls(sampling) if asked or sampling.repetition_penalty != 1.0 else None

    def apply(self, logits: torch.Tensor, prompt: Sequence[int]) -> torch.Tensor:
        """Lowered logits, `[vocabulary]`, in a tensor of their own."""
        if self._produced is None or self._seen is None:
            self._produced = torch.zeros(len(logits), device=logits.device)
            self._seen = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            known = [token for token in prompt if token < len(logits)]  # the head may have fewer
            self._seen[known] = True
        sampling = self._sampling
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        strength = sampling.repetition_penalty
        repeated = torch.where(scores > 0, scores / strength, scores * strength)
        scores = torch.where(self._seen, repeated, scores)
        scores = scores - sampling.frequency_penalty * self._produced
        return scores - sampling.presence_penalty * (self._produced > 0)

    def count(self, token: int) -> None:
        """A token was produced."""
        assert self._produced is not None
        assert self._seen is not None
        self._produced[token] += 1
        self._seen[token] = True


def _only(scores: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The scores with all tokens but the allowed ones at minus infinity."""
    keep = torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
    known = min(len(scores), len(allowed))
    if not bool(allowed[:known].any()):
        raise ValueError("the grammar allows no token of the model")
    keep[:known] = allowed[:known].to(scores.device, non_blocking=True)
    return scores.masked_fill(~keep, -torch.inf)


def _logprobs(
    logits: torch.Tensor, token: torch.Tensor, n_top: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely tokens `[n]`; log-probabilities of `token` `[1]` and of them, `[1 + n]`."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    top = logprobs.topk(min(n_top, len(logprobs)))
    return top.indices, torch.cat([logprobs.gather(0, token.clamp(min=0)), top.values])


def _no_token(logits: torch.Tensor) -> ValueError:
    """The reason why no token can be chosen."""
    n_nan = int(logits.isnan().sum())
    if n_nan:
        return ValueError(f"{n_nan} of {len(logits)} logits are NaN")
    return ValueError(f"no token can be drawn: the largest logit is {float(logits.max())}")
