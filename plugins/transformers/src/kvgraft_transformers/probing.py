"""Runs a few tokens through a model, to see what its layers keep and whether it can resume."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator, Sequence
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

__all__ = [
    "CACHE_ARGUMENTS",
    "Probe",
    "cache_argument",
    "check_kind",
    "check_layer",
    "describe_failure",
    "layer_modules",
    "plain_cache",
    "probe_model",
    "probe_shapes",
    "takes_positions",
    "undisturbed",
    "widened",
]

KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)
"""Supported cache layers, by exact class, because a subclass may keep more."""

MAMBA1_STATE_DIMS = 3
"""A Mamba1 state is `[batch, channels, state]`; all other recurrences have heads as well."""

STATE_DIMS = 4
"""Dimensions of a supported recurrent state: `[batch, heads, dim, state]`."""

CONV_DIMS = 3
"""Dimensions of a supported convolution state: `[batch, channels, width]`."""

PROBE_TOKENS = 2
"""Tokens after which shapes are read."""

LONGEST_REASON = 200
"""Most characters of an exception in a message."""


CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
"""Names of a model's cache argument: `cache`, or before transformers 5.24 `past_key_values`, or
`cache_params` in purely recurrent models.
"""

NO_MEMORY = ("loss", "logits", "hidden_states", "attentions", "cross_attentions", *CACHE_ARGUMENTS)
"""Outputs of a forward pass that are no memory outside of transformers' caches."""


class Probe(NamedTuple):
    """The cache after a pass over two tokens.

    Attributes:
        layers: the cache's layers at that time.
        own_cache: the class of cache that the model requires; None if it accepts others.
    """

    layers: list[Any]
    own_cache: type[Cache] | None


def cache_argument(model: PreTrainedModel) -> str:
    """The name of a model's cache argument; the first of `CACHE_ARGUMENTS` if it has none."""
    return next(_cache_arguments(model), CACHE_ARGUMENTS[0])


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model's forward pass has `position_ids`; others count the cached tokens."""
    return "position_ids" in inspect.signature(model.forward).parameters


def plain_cache(model: PreTrainedModel) -> Cache:
    """An empty cache of transformers' own layers, of a class that the model accepts."""
    return _empty_cache(model, _own_cache(model))


def probe_model(model: PreTrainedModel) -> Probe:
    """Run over two tokens.

    Another sequence runs before the first is continued, and must have no effect: a model with a
    state outside of its cache cannot resume from one.
    """
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(model, "is an encoder-decoder; kvgraft serves decoders")
    _check_rotation(model)
    _check_cache_argument(model)
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
    except Exception as error:
        raise UnsupportedModelError(
            model, f"does not run with a dynamic cache: {describe_failure(model, error)}"
        ) from error
    if not torch.equal(expected, disturbed):
        raise UnsupportedModelError(
            model, "keeps a state outside its cache: its output depends on the passes in between"
        )
    return Probe(layers, own)


def probe_shapes(model: PreTrainedModel) -> Probe:
    """Run over two tokens only for the shapes; works for a model on torch's device `meta`.

    Raises:
        Exception: the model's own.
    """
    made = _run(model, None, (3, 4), 0).get(cache_argument(model))
    own = type(made) if keeps_lightning_states(type(made)) else None
    cache = _empty_cache(model, own)
    if _alike(made, cache):
        return Probe(_shapes(made), own)
    _run(model, cache, (3, 4), 0)
    return Probe(_shapes(cache), own)


def _alike(made: Any, empty: Cache) -> bool:
    """Whether a model made a cache like the one that it would be given."""
    return type(made) is type(empty) and [_reach(each) for each in made.layers] == [
        _reach(each) for each in empty.layers
    ]


def _reach(layer: Any) -> tuple[type, object]:
    return type(layer), getattr(layer, "sliding_window", None)


def _check_cache_argument(model: PreTrainedModel) -> None:
    """Refuse a model that keeps its keys and values elsewhere, or nowhere.

    Raises:
        UnsupportedModelError: it names the outputs that the model returns instead.
    """
    if any(_cache_arguments(model)):
        return
    try:
        output = _run(model, None, (3, 4, 5, 6), 0)
        names = [name for name in output if name not in NO_MEMORY]
    except Exception:  # noqa: BLE001 - its result only completes the reason
        names = []
    reason = (
        f"its forward pass returns {', '.join(names)} instead"
        if names
        else "it returns no state to resume from either"
    )
    raise UnsupportedModelError(
        model, f"takes no cache of transformers (no argument cache or past_key_values): {reason}"
    )


def _cache_arguments(model: PreTrainedModel) -> Iterator[str]:
    """The cache arguments that a model has; some models have a `cache` that is a dictionary."""
    arguments = inspect.signature(model.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in arguments and "dict" not in str(arguments[name].annotation):
            yield name


def _own_cache(model: PreTrainedModel) -> type[Cache] | None:
    """The class of cache that a model makes by itself, if that keeps lightning states.

    A model with another class takes a dynamic cache instead, or raises.
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
    """Copies of the cache's layers."""
    return [copy.copy(layer) for layer in cache.layers]


def _check_rotation(model: PreTrainedModel) -> None:
    """Refuse rotary frequencies that depend on the length of the running sequence.

    Keys of a prefix would then depend on the whole prompt.
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


def check_kind(model: PreTrainedModel, index: int, layer: Any) -> None:
    """Refuse a layer whose data no component serves.

    Raises:
        UnsupportedModelError: it names the layer's number and type.
    """
    if type(layer) not in KNOWN_LAYERS:
        raise UnsupportedModelError(
            model,
            f"layer {index} ({_layer_type(model, index)}) keeps a {type(layer).__name__}, which is "
            "not served yet",
        )


def check_layer(model: PreTrainedModel, index: int, layer: Any) -> None:
    """Refuse a layer whose data no component serves, or that cannot resume from it.

    Raises:
        UnsupportedModelError: it names the layer's number and type.
    """
    check_kind(model, index, layer)
    kind = _layer_type(model, index)
    if getattr(layer, "indexer_position_ids", None) is not None:
        raise UnsupportedModelError(model, f"layer {index} ({kind}) keeps its indexer's positions")
    for state in getattr(layer, "recurrent_states", {}).values():
        if state is not None and state.dim() == MAMBA1_STATE_DIMS:
            raise UnsupportedModelError(
                model,
                f"layer {index} ({kind}) is a Mamba1 scan, which transformers restarts whenever it "
                "continues with more than one token; a reused prefix would change the answer",
            )
        if state is not None and state.dim() != STATE_DIMS:
            raise UnsupportedModelError(
                model,
                f"layer {index} ({kind}) keeps a recurrent state of shape {list(state.shape[1:])}; "
                "served are those of [heads, dim, state]",
            )
    convs = [each for each in getattr(layer, "conv_states", {}).values() if each is not None]
    if len({each.shape for each in convs}) > 1 or any(each.dim() != CONV_DIMS for each in convs):
        shapes = ", ".join(str(list(each.shape[1:])) for each in convs)
        raise UnsupportedModelError(
            model,
            f"layer {index} ({kind}) keeps convolution states of shapes {shapes}; served are those "
            "of [channels, width], all alike",
        )


def _layer_type(model: PreTrainedModel, index: int) -> str:
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None)
    return "attention" if types is None else str(types[index])


def describe_failure(model: PreTrainedModel, error: BaseException) -> str:
    """An exception of a forward pass in one line, with the deepest module involved.

    Args:
        model: the model with the modules.
        error: the exception with its traceback.
    """
    names = {module: name for name, module in model.named_modules() if name}
    place = ""
    trace = error.__traceback__
    while trace is not None:
        name = names.get(_module_of(trace.tb_frame.f_locals.get("self")))
        if name is not None and len(name) >= len(place):
            place = name
        trace = trace.tb_next
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:LONGEST_REASON]
    return f"{place}: {reason}" if place else reason


def _module_of(owner: object) -> torch.nn.Module:
    return owner if isinstance(owner, torch.nn.Module) else torch.nn.Module()


def layer_modules(model: PreTrainedModel) -> dict[str, torch.nn.Module]:
    """A model's layers by name, in order: the members of its longest list of modules."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
    ]
    if not lists:
        return {}
    name, longest = max(lists, key=lambda each: len(each[1]))
    return {f"{name}.{index}": module for index, module in enumerate(longest)}


@contextlib.contextmanager
def undisturbed(model: PreTrainedModel) -> Iterator[None]:
    """Run a model for a trial: evaluation mode, no gradients, nothing left behind.

    Restores random generators, training modes and attributes that passes set on modules.
    """
    device = torch.device(model.device)
    devices = [device] if device.type == "cuda" else []
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    buffers = [dict(module._buffers) for module in modules]
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, before, held in zip(modules, attributes, buffers):
                vars(module).clear()
                vars(module).update(before)
                module._buffers.clear()
                module._buffers.update(held)


@contextlib.contextmanager
def widened(model: PreTrainedModel) -> Iterator[None]:
    """Compute with float32 copies of half-precision weights, without changing the weights."""
    narrow = (torch.float16, torch.bfloat16)
    weights = [each for each in model.parameters() if each.dtype in narrow]
    before = [each.data for each in weights]
    held = [(module, dict(module._buffers)) for module in model.modules()]
    try:
        for each in weights:
            each.data = each.data.float()
        for module, buffers in held:
            for name, buffer in buffers.items():
                if buffer is not None and buffer.dtype in narrow:
                    module._buffers[name] = buffer.float()
        yield
    finally:
        for each, data in zip(weights, before):
            each.data = data
        for module, buffers in held:
            module._buffers.update(buffers)
