"""The content of a slot: planes of bytes, one or more per layer.

A component describes its payload once, as plane specs. Its device pool lays them out layer by
layer, one tensor per plane, as kernels need them; its host mirror page first, one contiguous
aligned slab per slot, as buses and disks need them. Copies pair planes by layer and name.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["PlaneSpec", "lane_dtype", "plane_nbytes"]


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
