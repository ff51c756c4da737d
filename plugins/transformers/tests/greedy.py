"""The plain model judges greedy answers: one pass over an answer, not one per token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

__all__ = ["best_tokens"]


def best_tokens(
    model: PreTrainedModel, prompt: Sequence[int], answer: Sequence[int]
) -> Sequence[int]:
    """The model's best token at each place of an answer, computed without a cache.

    Equal to the answer where that is greedy: its first token is the best one behind the prompt,
    and so on. Only in double precision: rounding depends on the length of a pass.
    """
    assert model.dtype == torch.float64
    ids = torch.tensor([[*prompt, *answer[:-1]]])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    best: list[int] = logits.argmax(-1).tolist()
    return best
