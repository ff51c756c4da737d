"""A few tokens through a model, to see what its layers keep and whether it can resume."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from kvgraft_transformers.errors import UnsupportedModelError
from kvgraft_transformers.lightning import LayeredCache, accepted_as, keeps_lightning_states

__all__ = ["Probe", "cache_argument", "check_layer", "plain_cache", "probe_model"]

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


class Probe(NamedTuple):
    """What two tokens left behind.

    Attributes:
        layers: of the cache, as they were then.
        own_cache: the class of cache the model insists on; None if others will do.
    """

    layers: list[Any]
    own_cache: type[Cache] | None


def cache_argument(model: PreTrainedModel) -> str:
    """What a model calls the cache it is given: models of recurrences alone say `cache_params`."""
    arguments = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in arguments else "past_key_values"


def plain_cache(model: PreTrainedModel) -> Cache:
    """An empty cache of transformers' own layers, of a class the model accepts."""
    return _empty_cache(model, _own_cache(model))


def probe_model(model: PreTrainedModel) -> Probe:
    """Run over two tokens.

    Another sequence runs before it is continued, and must not be noticed: a model that keeps a
    state outside its cache cannot resume from one.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(model, "is an encoder-decoder; kvgraft serves decoders")
    _check_rotation(model)
    first, other = (3, 4, 5, 6), (7, 8, 9)
    try:
        own = _own_cache(model)
        undisturbed, cache = (_empty_cache(model, own) for _ in range(2))
        _run(model, undisturbed, first[:PROBE_TOKENS], 0)
        expected = _run(model, undisturbed, first[PROBE_TOKENS:], PROBE_TOKENS).logits
        _run(model, cache, first[:PROBE_TOKENS], 0)
        layers = _shapes(cache)
        _run(model, _empty_cache(model, own), other, 0)
        disturbed = _run(model, cache, first[PROBE_TOKENS:], PROBE_TOKENS).logits
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(
            model, f"does not run with a dynamic cache: {reason}"
        ) from error
    if not torch.equal(expected, disturbed):
        raise UnsupportedModelError(
            model, "keeps a state outside its cache: what it says depends on what ran in between"
        )
    return Probe(layers, own)


def _own_cache(model: PreTrainedModel) -> type[Cache] | None:
    """The class of cache a model makes when it is given none, where that keeps lightning states.

    Any other class is left to the model: it takes a dynamic cache instead, or says why not.
    """
    made = type(_run(model, None, (3,), 0).get(cache_argument(model)))
    return made if keeps_lightning_states(made) else None


def _empty_cache(model: PreTrainedModel, own: type[Cache] | None) -> Cache:
    if own is None:
        return DynamicCache(config=model.config)
    return accepted_as(own, LayeredCache)(model.config)


def _run(model: PreTrainedModel, cache: Cache | None, tokens: Sequence[int], start: int) -> Any:
    """The output for a few tokens behind `start` others."""
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([tokens], device=model.device),
            position_ids=torch.arange(start, start + len(tokens), device=model.device)[None],
            use_cache=True,
            **{cache_argument(model): cache},
        )


def _shapes(cache: Cache) -> list[Any]:
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
