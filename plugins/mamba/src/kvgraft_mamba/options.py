"""Options of the `mamba` component."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationInfo, field_validator

from kvgraft import Dtype, LayerOptions, Tokens

__all__ = ["MambaOptions"]


class MambaOptions(LayerOptions):
    """The number and shape of states, and the places where requests leave them.

    A state does not grow with the sequence, so pools are sized in states; `device_tokens` and
    `host_tokens` only set the defaults. The default shapes take 224 bytes per state, for replaying
    traces; a model gives its own.

    Attributes:
        states: states on the device; one per 2,048 device tokens by default, at least 16.
        host_states: states in the host mirror, 0 for no mirror; one per 2,048 host tokens by
            default, at least 16, and 0 without host tokens.
        conv_dim: channels of the causal convolution per layer on this device; 0 if the layers
            have none.
        conv_width: inputs per channel that the convolution keeps: its kernel size minus one, or the
            kernel size if the engine keeps the newest input too.
        n_convs: convolutions per layer, of that size each.
        n_heads: heads of the recurrent state per layer on this device; 0 if the layers are short
            convolutions alone.
        head_dim: elements per head.
        state_dim: state elements per element of a head.
        dtype: element type of the convolution's inputs, the model's own.
        state_dtype: element type of the recurrent state. It accumulates the whole sequence, so it
            is float32 even for a model of lower precision.
        checkpoint_interval_tokens: during prefill, capture a state at each multiple of this many
            tokens; a multiple of the page size; None for none.
    """

    elsewhere: ClassVar[Mapping[str, str]] = {
        "max_mamba_cache_size": "states",
        "mamba_ssm_dtype": "state_dtype",
        "mamba_ssm_cache_dtype": "state_dtype",
    }

    states: PositiveInt | None = None
    host_states: NonNegativeInt | None = None
    conv_dim: NonNegativeInt = 8
    conv_width: PositiveInt = 3
    n_convs: PositiveInt = 1
    n_heads: NonNegativeInt = 1
    head_dim: PositiveInt = 4
    state_dim: PositiveInt = 4
    dtype: Dtype = "bfloat16"
    state_dtype: Dtype = "float32"
    checkpoint_interval_tokens: Annotated[Tokens, Field(gt=0)] | None = None

    @field_validator("conv_width", "n_convs")
    @classmethod
    def _of_a_convolution(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("conv_dim") == 0:
            raise ValueError("conv_dim 0 says there is no convolution; leave it out")
        return value

    @field_validator("n_heads")
    @classmethod
    def _something_to_keep(cls, n_heads: int, info: ValidationInfo) -> int:
        if n_heads == 0 and info.data.get("conv_dim") == 0:
            raise ValueError("neither heads nor a convolution: such a layer has no state")
        return n_heads
