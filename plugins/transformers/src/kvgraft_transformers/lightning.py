"""Lightning attention: models that accept only a cache of their own class.

transformers' MiniMax keeps its states in a list beside the layers of a dynamic cache and insists on
that class, `MiniMaxCache`. It calls two methods. Here they use transformers' layers for
recurrences, so that all other code treats these states like any other state. This also gives the
right length of the cache if the first layer is such a state: transformers' own class says 0 then,
and continues with more than one token behind a mask that is too short.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache

__all__ = ["LayeredCache", "accepted_as", "keeps_lightning_states"]

CacheT = TypeVar("CacheT", bound=Cache)


class _LightningStates(Cache):
    """The methods that lightning attention calls, over layers."""

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """The state `[batch, heads, dim, dim]` to continue from; None if the sequence begins."""
        layer = self.layers[layer_idx]
        state: torch.Tensor | None = layer.recurrent_states[0]
        return state if layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """Keep the state behind the pass's last token."""
        layer = self.layers[layer_idx]
        layer.update_recurrent_state(linear_cache)
        layer.has_previous_state[0] = True

    def __len__(self) -> int:
        return len(self.layers)


class LayeredCache(Cache):
    """The layers of transformers' dynamic cache, without its class: for `accepted_as`."""

    def __init__(self, config: Any) -> None:
        Cache.__init__(self, layers=DynamicCache(config=config).layers)


def keeps_lightning_states(cache: type[Any]) -> bool:
    """Whether a class of caches has the two methods that lightning attention calls."""
    return issubclass(cache, Cache) and all(
        hasattr(cache, method) for method in ("get_linear_cache", "set_linear_cache")
    )


def accepted_as(own: type[Cache], base: type[CacheT]) -> type[CacheT]:
    """A subclass of `base` that passes for the class that a model requires, with its methods.

    Args:
        own: a class that `keeps_lightning_states` accepts; its constructor is not called.
        base: a class that keeps everything in `layers` and initialises `Cache` itself.
    """
    name = f"{base.__name__}As{own.__name__}"
    return cast("type[CacheT]", type(name, (_LightningStates, base, own), {}))
