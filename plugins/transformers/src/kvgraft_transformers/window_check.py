"""Compares masks of windows at their edge, for any width.

The effect of a mask does not depend on the origin of the keys. So only a few tokens are computed,
behind a past of random keys and values that are drawn when a layer reads them: once the whole past,
as in one pass, and once the window's, as in a session. With the model's own mask both results must
be equal.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from kvgraft_transformers.errors import UnsupportedModelError
from kvgraft_transformers.probing import cache_argument, plain_cache, takes_positions

__all__ = ["check_wide_window"]

WIDEST = 1 << 15
"""Widest window that is compared: a layer draws keys and values for twice as many tokens."""

NEW_TOKENS = (3, 4)
"""Tokens computed behind the random past."""

FOR_SHAPES = (5, 6)
"""Tokens computed first, for the shapes of keys and values and for recurrent states."""


class _MadeUp:
    """A layer with random keys and values as its past."""

    n_past: int
    keys: torch.Tensor
    values: torch.Tensor

    def _attach(self, layer: DynamicLayer, n_past: int, seed: int) -> None:
        assert layer.keys is not None
        assert layer.values is not None
        self.n_past, self.seed = n_past, seed
        self.keys, self.values = layer.keys, layer.values
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """The length of the random past."""
        return self.n_past

    def _past(self, like: torch.Tensor, seed: int) -> torch.Tensor:
        """Random `[1, heads, n_past, dim]`; larger for longer pasts, since attention averages."""
        generator = torch.Generator(device=like.device).manual_seed(seed)
        shape = (*like.shape[:2], self.n_past, like.shape[-1])
        drawn = torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32)
        return drawn.to(like.dtype)

    def drawn(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values, the new ones last."""
        past = self._past(values, 2 * self.seed + 1) * self.n_past**0.5
        return (
            torch.cat([self._past(keys, 2 * self.seed), keys], dim=-2),
            torch.cat([past, values], dim=-2),
        )


class _Whole(_MadeUp, DynamicLayer):
    """The whole past."""

    def __init__(self, layer: DynamicLayer, n_past: int, seed: int) -> None:
        DynamicLayer.__init__(self)
        self._attach(layer, n_past, seed)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values."""
        return self.drawn(key_states, value_states)


class _Windowed(_MadeUp, DynamicSlidingWindowLayer):
    """Only the window's past."""

    def __init__(self, layer: DynamicSlidingWindowLayer, n_past: int, seed: int) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window=layer.sliding_window)
        self._attach(layer, n_past, seed)
        self.cumulative_length = n_past

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the window, as in a session."""
        first = max(0, self.n_past - self.sliding_window + 1)
        keys, values = self.drawn(key_states, value_states)
        return keys[..., first:, :], values[..., first:, :]


def check_wide_window(model: PreTrainedModel, window: int, bound: float) -> None:
    """Compare a model's output behind a window with its output behind the whole past.

    Args:
        model: in evaluation mode, without gradients.
        window: its tokens; nothing is compared beyond 32,768 of them, or beyond the model's
            context.
        bound: relative distance of logits that counts as rounding.

    Raises:
        UnsupportedModelError: they differ.
    """
    n_past = window + window // 2 + 3
    config = model.config.get_text_config(decoder=True)
    context = getattr(config, "max_position_embeddings", None) or 2 * WIDEST
    if window > WIDEST or n_past + len(NEW_TOKENS) > int(context):
        return
    said = [_say(model, n_past, whole=whole) for whole in (True, False)]
    if said[0] is None or said[1] is None:
        return
    spread = (said[0] - said[0].mean(dim=-1, keepdim=True)).norm(dim=-1)
    distance = float(((said[1] - said[0]).norm(dim=-1) / spread).max())
    if not distance <= bound:
        raise UnsupportedModelError(
            model,
            f"answers differently behind its window of {window} tokens, where older ones are no "
            f"longer kept: logits are {distance:.1g} apart (rounding: {bound:.1g})",
        )


def _say(model: PreTrainedModel, n_past: int, *, whole: bool) -> torch.Tensor | None:
    """Logits behind a random past; None if a layer keeps more than keys and values."""
    cache = plain_cache(model)
    _run(model, cache, FOR_SHAPES, 0)
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicSlidingWindowLayer and not whole:
            cache.layers[index] = _Windowed(layer, n_past, index)
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            if layer.keys is not None:
                cache.layers[index] = _Whole(layer, n_past, index)
        elif getattr(layer, "keys", None) is not None:
            return None
    logits = _run(model, cache, NEW_TOKENS, n_past).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits.float()


def _run(model: PreTrainedModel, cache: Cache, tokens: tuple[int, ...], start: int) -> Any:
    more: dict[str, Any] = {}
    if takes_positions(model):
        more["position_ids"] = torch.arange(start, start + len(tokens), device=model.device)[None]
    return model(
        input_ids=torch.tensor([tokens], device=model.device),
        use_cache=True,
        **{cache_argument(model): cache},
        **more,
    )
