"""Options that give a payload its shape: layers, heads and element type.

Shared by the component packages that keep keys and values. No torch here: dtypes are names until
`kvgraft.pools` builds planes of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from kvgraft.config import ComponentOptions

Dtype = Literal[
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8"
]
"""Element types by their torch names; `"uint8"` is for formats packed by the engine, such as
fp8 values with their scales in one row: give the row's bytes as its dimension."""

Layers = tuple[NonNegativeInt, ...] | None

MOST_LAYERS = 10_000
"""Far more than any model has."""


class LayerOptions(ComponentOptions):
    """The layers of the model that a component serves.

    Attributes:
        n_layers: number of layers.
        layers: their numbers in the model, ascending; `0 .. n_layers - 1` by default. Models that
            mix kinds of attention give each component its own, so that copies become ready in
            the order in which the model runs.
    """

    n_layers: Annotated[PositiveInt, Field(le=MOST_LAYERS)] = 2
    layers: Layers = None

    @field_validator("layers", mode="before")
    @classmethod
    def _no_count(cls, layers: object) -> object:
        if isinstance(layers, (int, str)):
            raise ValueError("give the layers' numbers, such as [0, 2]; n_layers is their count")
        return layers

    @field_validator("layers")
    @classmethod
    def _each_once(cls, layers: Layers, info: ValidationInfo) -> Layers:
        if layers is None:
            return None
        if list(layers) != sorted(set(layers)):
            raise ValueError("name each layer once, in ascending order")
        if len(layers) != (n_layers := info.data.get("n_layers", len(layers))):
            raise ValueError(f"{len(layers)} layers named, n_layers is {n_layers}; make them agree")
        return layers

    @property
    def layer_numbers(self) -> tuple[int, ...]:
        """The model's numbers of the layers, ascending."""
        return tuple(range(self.n_layers)) if self.layers is None else self.layers


class AttentionOptions(LayerOptions):
    """The shape of one token's keys and values.

    The defaults take 32 bytes per token, for replaying traces; a model gives its own.

    Attributes:
        kind: `"mha"` keeps keys and values per head (MHA, GQA and MQA differ in `n_kv_heads`
            alone); `"mla"` keeps one latent and one rotary key per token for all heads.
        n_kv_heads: key/value heads per layer on this device (mha).
        head_dim: elements of a key (mha).
        v_head_dim: elements of a value (mha); `head_dim` by default.
        latent_dim: elements of the compressed key/value latent (mla, required there).
        rope_dim: elements of the rotary key (mla, required there); 0 if there is none.
        dtype: element type of all of them.
    """

    kind: Literal["mha", "mla"] = "mha"
    n_kv_heads: PositiveInt = 1
    head_dim: PositiveInt = 4
    v_head_dim: PositiveInt | None = None
    latent_dim: PositiveInt | None = Field(default=None, validate_default=True)
    rope_dim: NonNegativeInt | None = Field(default=None, validate_default=True)
    dtype: Dtype = "bfloat16"

    @field_validator("n_kv_heads", "head_dim", "v_head_dim")
    @classmethod
    def _not_with_mla(cls, value: int | None, info: ValidationInfo) -> int | None:
        if info.data.get("kind") == "mla" and value is not None:
            raise ValueError("belongs to kind 'mha'; with 'mla' give latent_dim and rope_dim")
        return value

    @field_validator("latent_dim", "rope_dim")
    @classmethod
    def _exactly_with_mla(cls, value: int | None, info: ValidationInfo) -> int | None:
        if info.data.get("kind") == "mha" and value is not None:
            raise ValueError("belongs to kind 'mla'; with 'mha' give n_kv_heads and head_dim")
        if info.data.get("kind") == "mla" and value is None:
            raise ValueError("kind 'mla' needs it; take it from the model's configuration")
        return value
