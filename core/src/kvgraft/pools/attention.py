"""Planes of keys and values."""

from __future__ import annotations

import torch

from kvgraft.pools.options import AttentionOptions, Dtype
from kvgraft.pools.planes import PlaneSpec

__all__ = ["attention_planes", "torch_dtype"]


def torch_dtype(name: Dtype) -> torch.dtype:
    """The torch element type of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def attention_planes(options: AttentionOptions, page_size: int) -> list[PlaneSpec]:
    """The planes of one page of keys and values, in layer order.

    Per layer: `"k"` `(page_size, n_kv_heads, head_dim)` and `"v"` `(page_size, n_kv_heads,
    v_head_dim)`, or for MLA one plane `"latent"` `(page_size, latent_dim + rope_dim)`. Latent and
    rotary key share a row because they are never of use apart: scores read the whole row, values
    are a view of its front, and a copy moves one run of bytes per layer instead of two.
    """
    dtype = torch_dtype(options.dtype)
    if options.kind == "mla":
        width = (options.latent_dim or 0) + (options.rope_dim or 0)
        return [
            PlaneSpec(layer, "latent", (page_size, width), dtype) for layer in options.layer_numbers
        ]
    heads = (page_size, options.n_kv_heads)
    return [
        PlaneSpec(layer, name, (*heads, dim), dtype)
        for layer in options.layer_numbers
        for name, dim in (
            ("k", options.head_dim),
            ("v", options.v_head_dim or options.head_dim),
        )
    ]
