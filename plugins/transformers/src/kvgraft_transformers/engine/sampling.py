"""From logits to a token: greedy, or drawn after transformers' own warpers."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvgraft import SettingsModel

__all__ = ["Sampler", "Sampling"]

COLDEST = 1e-5
"""Temperatures below divide logits into infinity; they mean the most likely token."""


class Sampling(SettingsModel):
    """Settings for choosing the next token.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: draw among this many most likely tokens; 0 for all.
        top_p: draw among the fewest tokens whose probabilities add up to this much.
        seed: of the draws; with the same seed and logits the same tokens come.
    """

    temperature: NonNegativeFloat = 0.0
    top_k: NonNegativeInt = 0
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = None


class Sampler:
    """Chooses tokens for one request.

    Args:
        sampling: how.
        device: where the logits are.
    """

    def __init__(self, sampling: Sampling, device: torch.device | str = "cpu") -> None:
        self.sampling = sampling
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
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))

    def pick(self, logits: torch.Tensor) -> int:
        """The next token, from logits `[vocabulary]`.

        Raises:
            ValueError: logits that are no numbers.
        """
        if bool(logits.isnan().any()):
            raise ValueError(f"{int(logits.isnan().sum())} of {len(logits)} logits are NaN")
        if self._greedy:
            return int(logits.argmax())
        warped = self._warpers(None, logits[None].float())
        weights = torch.softmax(warped, dim=-1)[0]
        return int(torch.multinomial(weights, 1, generator=self._generator))
