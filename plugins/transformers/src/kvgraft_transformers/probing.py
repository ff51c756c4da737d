"""A few tokens through a model, to see what its layers keep and whether it can resume."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvgraft_transformers.errors import UnsupportedModelError

__all__ = ["cache_argument", "check_layer", "probe_layers"]

KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)
"""Cache layers served here; each exactly, because a subclass keeps something more."""

MAMBA1_STATE_DIMS = 3
"""A Mamba1 state is `[batch, channels, state]`; all other recurrences have heads as well."""

PROBE_TOKENS = 2
"""Tokens after which shapes are read."""


def cache_argument(model: PreTrainedModel) -> str:
    """What a model calls the cache it is given: models of recurrences alone say `cache_params`."""
    arguments = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in arguments else "past_key_values"


def probe_layers(model: PreTrainedModel) -> list[Any]:
    """The cache layers of a run over two tokens.

    Another sequence runs before it is continued, and must not be noticed: a model that keeps a
    state outside its cache cannot resume from one.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(model, "is an encoder-decoder; kvgraft serves decoders")
    _check_rotation(model)
    first, other = (3, 4, 5, 6), (7, 8, 9)
    try:
        undisturbed, cache = (DynamicCache(config=model.config) for _ in range(2))
        _run(model, undisturbed, first[:PROBE_TOKENS], 0)
        expected = _run(model, undisturbed, first[PROBE_TOKENS:], PROBE_TOKENS)
        _run(model, cache, first[:PROBE_TOKENS], 0)
        layers = _shapes(cache)
        _run(model, DynamicCache(config=model.config), other, 0)
        disturbed = _run(model, cache, first[PROBE_TOKENS:], PROBE_TOKENS)
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(
            model, f"does not run with a dynamic cache: {reason}"
        ) from error
    if not torch.equal(expected, disturbed):
        raise UnsupportedModelError(
            model, "keeps a state outside its cache: what it says depends on what ran in between"
        )
    return layers


def _run(
    model: PreTrainedModel, cache: DynamicCache, tokens: Sequence[int], start: int
) -> torch.Tensor:
    """Logits of a few tokens behind `start` others."""
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor([tokens], device=model.device),
            position_ids=torch.arange(start, start + len(tokens), device=model.device)[None],
            use_cache=True,
            **{cache_argument(model): cache},
        )
    logits: torch.Tensor = output.logits
    return logits


def _shapes(cache: DynamicCache) -> list[Any]:
    """The cache's layers as they are now."""
    return [copy.copy(layer) for layer in cache.layers]


def _check_rotation(model: PreTrainedModel) -> None:
    """Refuse rotary frequencies that follow the length of what runs.

    Keys of a prefix would then depend on the prompt they were computed for.
    """
    config = model.config.get_text_config(decoder=True)
    given = getattr(config, "rope_parameters", None) or {}
    for each in (given, *(value for value in given.values() if isinstance(value, dict))):
        if each.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedModelError(
                model,
                f"rotates keys by {each['rope_type']!r} frequencies, which follow the length of a "
                "prompt; a prefix of one is not a prefix of another",
            )


def check_layer(model: PreTrainedModel, index: int, layer: Any) -> None:
    kind = _layer_type(model, index)
    if type(layer) not in KNOWN_LAYERS:
        raise UnsupportedModelError(
            model, f"layer {index} ({kind}) keeps a {type(layer).__name__}, which is not served yet"
        )
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedModelError(model, f"layer {index} ({kind}) keeps its indexer's positions")
    for state in getattr(layer, "recurrent_states", {}).values():
        if state is not None and state.dim() == MAMBA1_STATE_DIMS:
            raise UnsupportedModelError(
                model,
                f"layer {index} ({kind}) is a Mamba1 scan, which transformers restarts whenever it "
                "continues with more than one token; a reused prefix would change the answer",
            )


def _layer_type(model: PreTrainedModel, index: int) -> str:
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return "attention" if types is None else str(types[index])
