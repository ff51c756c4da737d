"""Geometries of layers' data: layers with equal geometry share a component's pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicSlidingWindowLayer

__all__ = ["Geometry", "Index", "Pages", "State", "index_of", "pages_of", "state_of"]


@dataclass(frozen=True, slots=True)
class Pages:
    """Geometry of keys and values."""

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
            # the *next* token sees one past token less than the window
            options["window"] = max(1, self.window - 1)
        if self.package == "hisparse":
            options |= {"index_dim": self.index_dim, "index_dtype": self.index_dtype}
        return options


@dataclass(frozen=True, slots=True)
class Index:
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
class State:
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


Geometry: TypeAlias = Pages | Index | State
"""Layers of equal geometry share a pool."""


def pages_of(model: PreTrainedModel, layer: Any, *, sparse_on_host: bool) -> Pages | None:
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is None or values is None:
        return None
    _, n_heads, _, key_dim = keys.shape
    value_dim = values.shape[-1]
    rank = _latent_rank(model)
    index = getattr(layer, "indexer_keys", None)
    sparse = index is not None and sparse_on_host
    package = "hisparse" if sparse else "full"
    window = None
    if isinstance(layer, DynamicSlidingWindowLayer):
        package, window = "swa", int(layer.sliding_window)
    return Pages(
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


def _latent_rank(model: PreTrainedModel) -> int | None:
    """Elements of a latent row; None without one, or if layers differ."""
    try:
        return getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None)
    except Exception:  # noqa: BLE001 - configurations of layers that differ raise errors of their own
        return None


def index_of(layer: Any) -> Index | None:
    keys = getattr(layer, "indexer_keys", None)
    return None if keys is None else Index(keys.shape[-1], _dtype(keys))


def state_of(layer: Any) -> State | None:
    convs = [each for each in getattr(layer, "conv_states", {}).values() if each is not None]
    recurrent = [
        each for each in getattr(layer, "recurrent_states", {}).values() if each is not None
    ]
    if not convs and not recurrent:
        return None
    conv: tuple[int, ...] = ()
    n_convs = len(convs)
    if len({each.shape for each in convs}) > 1:  # of different shapes, the sum of elements
        width = min(each.shape[-1] for each in convs)
        conv, n_convs = (sum(math.prod(each.shape[1:]) for each in convs) // width, width), 1
    elif convs:
        conv = _two(convs[0].shape[1:])
    state = tuple(recurrent[0].shape[1:]) if recurrent else ()
    return State(
        n_convs=n_convs,
        conv=conv,
        dtype=_dtype(convs[0]) if convs else "",
        recurrent=state if len(state) in (0, 3) else (1, *_two(state)),
        state_dtype=_dtype(recurrent[0]) if recurrent else "",
    )


def _two(shape: Sequence[int]) -> tuple[int, int]:
    """A shape in two dimensions: a Mamba1 state has channels and no heads."""
    return math.prod(shape[:-1]), shape[-1]


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
