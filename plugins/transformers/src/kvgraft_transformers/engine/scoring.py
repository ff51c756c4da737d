"""Log-probabilities of a prompt's own tokens, noted chunk by chunk.

They need the logits of every position, which no cache keeps. So a request that asks for them
computes its whole prompt: it begins with its first token alone, which nothing can be hit for, and
its other tokens follow as if they were decoded. Its data is shared like any other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kvgraft_transformers.engine.sampling import TokenLogprob

__all__ = ["PromptScore", "PromptToken"]

ROWS = 64
"""Positions whose probabilities are in memory at a time."""


class PromptToken(NamedTuple):
    """A token of a prompt.

    Attributes:
        token: its id.
        logprob: the logarithm of its probability behind the tokens before; None for the first.
        rank: its place among all tokens by probability, from 1; None for the first.
        top: the most likely tokens there, best first; as many as requested.
    """

    token: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[TokenLogprob, ...] = ()


class PromptScore:
    """The log-probabilities of one prompt, as far as it is computed.

    Args:
        tokens: the prompt.
        n_top: most likely tokens to return per position.

    Attributes:
        tokens: those that are known; all of them once `ended`.
    """

    def __init__(self, tokens: Sequence[int], n_top: int) -> None:
        self._prompt = tokens
        self._n_top = n_top
        self.tokens = [PromptToken(tokens[0])]

    @property
    def ended(self) -> bool:
        """Whether all are known."""
        return len(self.tokens) == len(self._prompt)

    @property
    def n_known(self) -> int:
        """Tokens of the prompt whose successors are known: they need not be computed again."""
        return len(self.tokens) - 1

    def note(self, start: int, logits: torch.Tensor) -> None:
        """Note the logits of positions from `start` on, `[n, vocabulary]`."""
        first = self.n_known
        rows = logits[first - start : len(self._prompt) - 1 - start]
        for part in torch.split(rows, ROWS):
            targets = self._prompt[self.n_known + 1 : self.n_known + 1 + len(part)]
            logprobs = torch.log_softmax(part.float(), dim=-1)
            places = torch.tensor(targets, device=logprobs.device)[:, None]
            own = logprobs.gather(1, places)
            ranks = (logprobs > own).sum(-1) + 1
            top = logprobs.topk(min(self._n_top, logprobs.shape[-1]), dim=-1)
            read = zip(
                *(targets, own[:, 0].tolist(), ranks.tolist()),
                *(top.indices.tolist(), top.values.tolist()),
            )
            for token, logprob, rank, likely, values in read:
                best = tuple(map(TokenLogprob, likely, values))
                self.tokens.append(PromptToken(token, logprob, rank, best))
