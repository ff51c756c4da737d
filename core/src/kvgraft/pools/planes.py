"""The content of a slot: planes of bytes, one or more per layer.

A component describes its payload once, as plane specs. Its device pool lays them out layer by
layer, one tensor per plane, as kernels need them; its host mirror page first, one contiguous
aligned slab per slot, as buses and disks need them. Copies pair planes by layer and name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvgraft.pools.options import AttentionOptions, Dtype


class PlaneSpec(NamedTuple):
    """One tensor's share of a slot.

    Attributes:
        layer: the model layer it belongs to; copies become ready layer by layer.
        name: unique within the layer, such as `"k"` or `"conv"`.
        shape: shape of one slot, such as `(page_size, n_kv_heads, head_dim)`.
        dtype: element type.
    """

    layer: int
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def plane_nbytes(spec: PlaneSpec) -> int:
    """Bytes of one slot in this plane."""
    count = 1
    for size in spec.shape:
        count *= size
    return count * spec.dtype.itemsize


def lane_dtype(nbytes: int) -> torch.dtype:
    """The widest integer type that divides a row of `nbytes`, to move rows without conversion."""
    for dtype in (torch.int64, torch.int32, torch.int16):
        if nbytes % dtype.itemsize == 0:
            return dtype
    return torch.uint8


def torch_dtype(name: Dtype) -> torch.dtype:
    """The torch element type of that name."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def attention_planes(options: AttentionOptions, page_size: int) -> list[PlaneSpec]:
    """The planes of one page of keys and values, in layer order.

    Per layer: `"k"` `(page_size, n_kv_heads, head_dim)` and `"v"` `(page_size, n_kv_heads,
    v_head_dim)`, or for MLA one plane `"latent"` `(page_size, latent_dim + rope_dim)`. Latent and
    rotary key share a row because they are always used together: scores read the whole row, values
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
