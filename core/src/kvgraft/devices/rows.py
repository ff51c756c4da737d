"""Rows of tensors to copy."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["PlaneCopy"]


class PlaneCopy(NamedTuple):
    """Rows of one plane to move: `target[target_rows] = source[source_rows]`.

    Attributes:
        layer: the model layer whose data is complete once its copies are done.
        source: integer rows `[n_slots, n_lanes]` that are read.
        target: integer rows `[n_slots, n_lanes]` of equal row size that are written.
        source_rows: which of `source`, int64 `[n]` on the CPU.
        target_rows: which of `target`, int64 `[n]` on the CPU.
    """

    layer: int
    source: torch.Tensor
    target: torch.Tensor
    source_rows: torch.Tensor
    target_rows: torch.Tensor
