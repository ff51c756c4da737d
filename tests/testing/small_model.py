"""A small model with layers of several kinds, over a cache's pools or over everything at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvgraft import Cache, Request

__all__ = ["SmallModel", "attention", "recurrence"]

WIDTH = 4

Sees = Callable[[int, int], bool]
"""Whether the token at the first position attends to the one at the second."""


class SmallModel:
    """One layer per component, in turn; each adds to the residual stream.

    Args:
        layers: by component, the tokens its layer sees; None for a recurrence.
    """

    vocabulary = 11

    def __init__(self, layers: Mapping[str, Sees | None]) -> None:
        generator = torch.Generator().manual_seed(3)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.layers = layers
        self.embedding = weights(self.vocabulary, WIDTH)
        self.projections = {name: weights(3, WIDTH, WIDTH) for name in layers}

    def whole(self, tokens: Sequence[int]) -> torch.Tensor:
        hidden = self.embedding[list(tokens)]
        for name, sees in self.layers.items():
            q, k, v = (hidden @ each for each in self.projections[name])
            if sees is None:
                hidden = hidden + recurrence(k, torch.zeros(WIDTH, dtype=hidden.dtype))
            else:
                hidden = hidden + attention(q, k, v, 0, 0, sees)
        return hidden @ self.embedding.T

    def step(self, cache: Cache, request: Request, tokens: Sequence[int]) -> torch.Tensor:
        hidden, start = self.embedding[list(tokens)], request.computed
        end = start + len(tokens)
        for name, sees in self.layers.items():
            q, k, v = (hidden @ each for each in self.projections[name])
            pool = next(each.component.device for each in cache.mounted if each.name == name)
            if sees is None:
                state = pool.plane(0, "recurrent")[cache.state_slot(request, name)].view(-1)
                if start == 0:
                    state[:] = 0
                states = recurrence(k, state.clone())
                state[:] = states[-1]
                hidden = hidden + states
                continue
            first = min(at for at in range(end) if sees(start, at))
            page = cache.config.page_size
            slots = torch.from_numpy(cache.table(request, name).copy()).long()
            position = torch.arange(first, end)
            rows = slots[position // page] * page + position % page
            keys, values = (pool.plane(0, each).view(-1, WIDTH) for each in ("k", "v"))
            keys[rows[start - first :]], values[rows[start - first :]] = k, v
            hidden = hidden + attention(q, keys[rows], values[rows], start, first, sees)
        return hidden @ self.embedding.T


def attention(q: Any, k: Any, v: Any, start: int, first: int, sees: Sees) -> torch.Tensor:
    """Attention of tokens from `start` on to tokens from `first` on."""
    mask = [[sees(start + i, first + j) for j in range(len(k))] for i in range(len(q))]
    scores = (q @ k.T).masked_fill(~torch.tensor(mask), -torch.inf)
    result: torch.Tensor = torch.softmax(scores, dim=-1) @ v
    return result


def recurrence(inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The states after each input; each forgets a tenth of the one before."""
    states = []
    for each in inputs:
        state = 0.9 * state + torch.tanh(each)
        states.append(state)
    return torch.stack(states)
