"""Planes of equal geometry that lie one behind another: all of them move at once.

A model of 48 recurrent layers keeps a state in 96 planes. Copied plane by plane it costs hundreds
of calls; in a stack `[n_planes, n_slots, n_lanes]` the planes of a kind cost one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

__all__ = ["PLANE_ALIGNMENT", "copy_rows", "stack_lanes"]

PLANE_ALIGNMENT = 512
"""Bytes to which every plane of a stack is aligned, as torch aligns memory on devices."""

MOVED_NBYTES = 256 << 20
"""Most bytes that a copy on a device gathers at a time: memory that it takes beside the pool."""


def stack_lanes(lanes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of planes `[n_slots, n_lanes]` as few tensors `[n_planes, n_slots, n_lanes]`.

    Planes share a stack if they have one shape and element type and lie in one piece of memory, an
    equal distance apart, as in a pool of its own and in an engine's tensor with a row per layer.
    Views, no copies; together they cover every plane once.
    """
    alike: dict[object, list[torch.Tensor]] = {}
    for rows in lanes:
        where = rows.untyped_storage().data_ptr()
        alike.setdefault((where, rows.shape, rows.stride(), rows.dtype), []).append(rows)
    stacks = []
    for group in alike.values():
        group.sort(key=torch.Tensor.storage_offset)
        steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(group)}
        if len(steps) > 1 or 0 in steps:
            stacks += [rows[None] for rows in group]
            continue
        first, step = group[0], steps.pop() if steps else 0
        shape, stride = (len(group), *first.shape), (step, *first.stride())
        stacks.append(first.as_strided(shape, stride, first.storage_offset()))
    return stacks


def copy_rows(
    stack: torch.Tensor, read: torch.Tensor, write: torch.Tensor, limit_nbytes: int = MOVED_NBYTES
) -> None:
    """`stack[:, write] = stack[:, read]`, in two calls for each `limit_nbytes` bytes.

    Args:
        stack: `[n_planes, n_slots, n_lanes]`.
        read: which slots, int64 `[n]` on its device.
        write: the slots that become their copies, int64 `[n]` there; none of `read`, none twice.
        limit_nbytes: most bytes to gather at a time, as far as one slot allows.
    """
    row_nbytes = stack.shape[0] * stack.shape[2] * stack.element_size()
    at_once = max(1, limit_nbytes // max(1, row_nbytes))
    if len(read) <= at_once:
        stack.index_copy_(1, write, stack.index_select(1, read))
        return
    for some, into in zip(torch.split(read, at_once), torch.split(write, at_once)):
        stack.index_copy_(1, into, stack.index_select(1, some))
