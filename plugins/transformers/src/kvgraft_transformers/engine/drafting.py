"""Drafts for a pass: tokens that probably come next, which the model verifies together.

Prompt lookup takes them from the sequence itself: those that followed its last tokens before. It is
transformers' own, `PromptLookupCandidateGenerator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from kvgraft import TokenKey

__all__ = ["Drafter", "PromptLookup"]

NGRAM_TOKENS = 3
"""Most tokens at the end of a sequence that are looked up in it; fewer where these are new."""


class Drafter(Protocol):
    """Proposes drafts for one sequence at a time."""

    def propose(self, key: TokenKey, most: int) -> Sequence[int]:
        """Tokens that may follow those of `key`, best guesses in order; at most `most`, or none."""

    def close(self) -> None:
        """The engine has closed, and asks for no more drafts."""


class PromptLookup:
    """Drafts from the prompt and the output so far.

    Args:
        max_drafts: most tokens at a time.

    Cost: a comparison with every token of the sequence for each length of the n-gram.
    """

    def __init__(self, max_drafts: int) -> None:
        self._find: Any = PromptLookupCandidateGenerator(
            num_output_tokens=max_drafts,
            max_matching_ngram_size=NGRAM_TOKENS,
            max_length=2**31,
        )

    def propose(self, key: TokenKey, most: int) -> Sequence[int]:
        """The tokens behind the first place with the same last tokens; see `Drafter`."""
        tokens = torch.tensor(key.tokens()).unsqueeze(0)
        found, _ = self._find.get_candidates(tokens)
        drafts: list[int] = found[0, tokens.shape[1] :][:most].tolist()
        return drafts

    def close(self) -> None:
        """Nothing: it holds nothing."""
