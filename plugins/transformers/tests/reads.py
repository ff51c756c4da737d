"""Counts the times that the host waits for a value of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Reads"]


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts reads of single values, each of which waits for an accelerator."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})
