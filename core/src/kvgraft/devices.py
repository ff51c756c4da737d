"""Devices other than the CPU, as pools see them; `kvgraft_accelerator` knows their streams.

The CPU needs none of this: torch allocates its memory, and worker threads copy it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["SIMULATED", "DeviceRuntime", "PlaneCopy", "torch_device"]


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


SIMULATED = "simulated"
"""The name of the simulated device, where torch has a name for every other."""


def torch_device(name: str) -> torch.device:
    """Torch's device for the tensors on the device of this name.

    Raises:
        RuntimeError: torch knows no such device.
    """
    return torch.device("privateuseone" if name == SIMULATED else name)


class DeviceRuntime(Protocol):
    """One device: part `accelerator`.

    Attributes:
        device: torch's device of its tensors.
    """

    device: torch.device

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, label: str) -> torch.Tensor:
        """Zeroed memory of the device; `label` names it in messages."""

    def page_locked(self, nbytes: int, label: str) -> torch.Tensor:
        """Zeroed memory of the host that copies reach in the background, uint8 `[nbytes]`."""

    def compute(self) -> Any:
        """The stream of the calling thread's kernels; `copy` takes groups of copies."""
