"""What a model keeps per layer, read off the model itself.

Configurations name heads, ranks and kernels in a hundred ways; what a layer puts into its cache has
one form. So the model runs once over two tokens with transformers' own cache, and the shapes that
are there afterwards decide which component serves which layer, with which geometry.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

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

__all__ = ["Architecture", "LayerPlan", "cache_argument", "read_architecture"]

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


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Who keeps what one layer needs.

    Attributes:
        index: the layer's number in the model.
        paged: component of its keys and values; None if it has none.
        window: most recent tokens its attention sees, the new one included; None for all.
        latent: whether keys and values are one row of the component's `"latent"` plane.
        key_dim: elements of a key; where a latent row is split.
        indexer: component of its indexer keys; None if it has none.
        sparse: whether its keys and values stay on the host and selected rows are fetched.
        state: component of its recurrent state; None if it has none.
        n_convs: convolution states.
        has_recurrent: whether it has a recurrent state beside them.
    """

    index: int
    paged: str | None = None
    window: int | None = None
    latent: bool = False
    key_dim: int = 0
    indexer: str | None = None
    sparse: bool = False
    state: str | None = None
    n_convs: int = 0
    has_recurrent: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model's layers and the components they need.

    Attributes:
        layers: in the model's order, those that keep nothing included.
        components: options by component name, without sizes.
    """

    layers: tuple[LayerPlan, ...]
    components: dict[str, dict[str, Any]]

    def of_package(self, package: str) -> list[str]:
        """The components that are instances of a package."""
        return [name for name in self.components if name.partition("@")[0] == package]


@dataclass(frozen=True, slots=True)
class _Pages:
    """Geometry of keys and values: layers that agree in it share a pool."""

    package: str
    window: int | None
    latent: bool
    n_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    index_dim: int
    index_dtype: str

    @property
    def label(self) -> str:
        window = f"w{self.window}-" if self.window is not None else ""
        return f"{window}{self.n_heads}x{self.key_dim}"

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.latent:
            options |= {"kind": "mla", "latent_dim": self.key_dim, "rope_dim": self.value_dim}
        else:
            options |= {
                "n_kv_heads": self.n_heads,
                "head_dim": self.key_dim,
                "v_head_dim": self.value_dim,
            }
        if self.window is not None:
            # what the *next* token sees of the past is one less than what it sees
            options["window"] = max(1, self.window - 1)
        if self.package == "hisparse":
            options |= {"index_dim": self.index_dim, "index_dtype": self.index_dtype}
        return options


@dataclass(frozen=True, slots=True)
class _Index:
    """Geometry of indexer keys that stay on the device."""

    dim: int
    dtype: str

    package: ClassVar[str] = "full"

    @property
    def label(self) -> str:
        return f"indexer-{self.dim}"

    def options(self) -> dict[str, Any]:
        return {"kind": "mla", "latent_dim": self.dim, "rope_dim": 0, "dtype": self.dtype}


@dataclass(frozen=True, slots=True)
class _State:
    """Geometry of a recurrent state."""

    n_convs: int
    conv: tuple[int, ...]
    dtype: str
    recurrent: tuple[int, ...]
    state_dtype: str

    package: ClassVar[str] = "mamba"

    @property
    def label(self) -> str:
        return "x".join(str(size) for size in (*self.conv, *self.recurrent))

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"conv_dim": 0, "n_heads": 0}
        if self.conv:
            channels, width = self.conv
            options |= {"conv_dim": channels, "conv_width": width, "n_convs": self.n_convs}
            options["dtype"] = self.dtype
        if self.recurrent:
            heads, dim, state = self.recurrent
            options |= {"n_heads": heads, "head_dim": dim, "state_dim": state}
            options["state_dtype"] = self.state_dtype
        return options


def read_architecture(model: PreTrainedModel, *, sparse_on_host: bool) -> Architecture:
    """The components a model needs, from one run over two tokens.

    Args:
        model: a decoder with a language-model head, on any device.
        sparse_on_host: whether layers with an indexer keep keys and values on the host.

    Raises:
        UnsupportedModelError: a layer, or a model, that keeps something else; it is named.
    """
    layers = _probe(model)
    pages: list[_Pages | None] = []
    indexes: list[_Index | None] = []
    states: list[_State | None] = []
    for index, layer in enumerate(layers):
        _check_layer(model, index, layer)
        pages.append(_pages(model, layer, sparse_on_host=sparse_on_host))
        indexes.append(None if sparse_on_host else _index(layer))
        states.append(_state(layer))
    if not any([*pages, *indexes, *states]):
        raise UnsupportedModelError(model, "keeps nothing that a later request could reuse")
    if sparse_on_host and not any(kv is not None and kv.package == "hisparse" for kv in pages):
        raise UnsupportedModelError(
            model, "has no layer with an indexer to keep on the host; leave sparse_on_host off"
        )
    names = _name([*pages, *indexes, *states])
    components: dict[str, dict[str, Any]] = {}
    for group in (pages, indexes, states):
        for index, geometry in enumerate(group):
            if geometry is not None:
                options = components.setdefault(
                    names[geometry], {**geometry.options(), "layers": []}
                )
                options["layers"].append(index)
    for options in components.values():
        options["n_layers"] = len(options["layers"])
    plans = [
        LayerPlan(
            index=index,
            paged=None if kv is None else names[kv],
            window=None if kv is None else kv.window,
            latent=kv is not None and kv.latent,
            key_dim=0 if kv is None else kv.key_dim,
            indexer=_indexer(kv, key, names),
            sparse=kv is not None and kv.package == "hisparse",
            state=None if state is None else names[state],
            n_convs=0 if state is None else state.n_convs,
            has_recurrent=state is not None and bool(state.recurrent),
        )
        for index, (kv, key, state) in enumerate(zip(pages, indexes, states, strict=True))
    ]
    return Architecture(tuple(plans), components)


def _indexer(
    kv: _Pages | None, key: _Index | None, names: dict[_Pages | _Index | _State, str]
) -> str | None:
    if kv is not None and kv.package == "hisparse":
        return names[kv]
    return None if key is None else names[key]


def _name(
    geometries: Sequence[_Pages | _Index | _State | None],
) -> dict[_Pages | _Index | _State, str]:
    """A component name for each geometry: the package's, labelled where it has more than one."""
    distinct = list(dict.fromkeys(each for each in geometries if each is not None))
    names: dict[_Pages | _Index | _State, str] = {}
    for geometry in distinct:
        same = [each for each in distinct if each.package == geometry.package]
        name = geometry.package if len(same) == 1 else f"{geometry.package}@{geometry.label}"
        if name in names.values():
            name = f"{name}-{len(names)}"
        names[geometry] = name
    return names


def cache_argument(model: PreTrainedModel) -> str:
    """What a model calls the cache it is given: models of recurrences alone say `cache_params`."""
    arguments = inspect.signature(model.forward).parameters
    return "cache_params" if "cache_params" in arguments else "past_key_values"


def _probe(model: PreTrainedModel) -> list[Any]:
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


def _check_layer(model: PreTrainedModel, index: int, layer: Any) -> None:
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


def _pages(model: PreTrainedModel, layer: Any, *, sparse_on_host: bool) -> _Pages | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    _, n_heads, _, key_dim = keys.shape
    value_dim = values.shape[-1]
    rank = getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None)
    index = getattr(layer, "indexer_keys", None)
    sparse = index is not None and sparse_on_host
    package = "hisparse" if sparse else "full"
    window = None
    if isinstance(layer, DynamicSlidingWindowLayer):
        package, window = "swa", int(layer.sliding_window)
    return _Pages(
        package=package,
        window=window,
        latent=n_heads == 1 and rank is not None and rank == key_dim,
        n_heads=n_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=_dtype(keys),
        index_dim=index.shape[-1] if index is not None and sparse else 0,
        index_dtype=_dtype(index) if index is not None and sparse else "",
    )


def _index(layer: Any) -> _Index | None:
    keys = getattr(layer, "indexer_keys", None)
    return None if keys is None else _Index(keys.shape[-1], _dtype(keys))


def _state(layer: Any) -> _State | None:
    convs = [each for each in getattr(layer, "conv_states", {}).values() if each is not None]
    recurrent = [
        each for each in getattr(layer, "recurrent_states", {}).values() if each is not None
    ]
    if not convs and not recurrent:
        return None
    return _State(
        n_convs=len(convs),
        conv=tuple(convs[0].shape[1:]) if convs else (),
        dtype=_dtype(convs[0]) if convs else "",
        recurrent=tuple(recurrent[0].shape[1:]) if recurrent else (),
        state_dtype=_dtype(recurrent[0]) if recurrent else "",
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
