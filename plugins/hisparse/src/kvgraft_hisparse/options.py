"""Options of the `hisparse` component."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from kvgraft import AttentionOptions, Dtype, Tokens

__all__ = ["HisparseOptions"]


class HisparseOptions(AttentionOptions):
    """The indexer and the hot buffers, beside `kvgraft.AttentionOptions`.

    `host_tokens` sizes the keys and values, `device_tokens` the indexer keys. The defaults take 48
    bytes per token on HOST and 16 on DEVICE, for replaying traces; a model gives its own.

    Attributes:
        index_dim: elements of an indexer key per token and layer.
        index_dtype: their element type.
        hot_tokens: tokens whose keys and values a running request holds on DEVICE, per layer: at
            least as many as one step selects (top-k).
        max_running: running requests that get hot buffers at a time.
    """

    index_dim: PositiveInt = 4
    index_dtype: Dtype = "bfloat16"
    hot_tokens: Tokens = Field(default=4096, gt=0)
    max_running: PositiveInt = 16
