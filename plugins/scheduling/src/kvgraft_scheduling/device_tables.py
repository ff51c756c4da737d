"""Page tables on a device, and a step's tensors there, for kernels.

The next step writes the tables of `Rows` in place, maybe before the device has read them. So a
device has tables of its own, which repeat each step's changes after the kernels of the step before.
A step's tensors are one copy from page-locked memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from kvgraft.cache import Cache
from kvgraft.errors import ConfigError
from kvgraft.parts import Step

__all__ = ["DeviceTables"]

ALIGNMENT = 16
"""Alignment in bytes of each tensor in the copied one."""


class DeviceTables:
    """The page tables of a cache's running requests, on a device.

    Args:
        cache: opened with `max_requests` and `max_tokens`, which are the tables' size.
        device: where kernels run, as torch names it; that of the cache's pools by default.

    Attributes:
        tables: by paged component, int32 `[max_requests, max_pages * slots_per_page]`. They stay
            where they are, as a CUDA graph needs them.

    Raises:
        ConfigError: a cache whose tables grow.
    """

    def __init__(self, cache: Cache, device: str | torch.device | None = None) -> None:
        if cache.config.max_requests is None or cache.config.max_tokens is None:
            raise ConfigError(
                "page tables on a device have a fixed size; open the cache with max_requests and "
                "max_tokens"
            )
        self.device = torch.device(cache.config.device if device is None else device)
        paged = [each.name for each in cache.tree.components if not each.is_state]
        self.tables = {name: cache.table_rows(name).to(self.device, copy=True) for name in paged}

    def upload(self, step: Step) -> Step:
        """Bring the tables up to date with a step, and its tensors to the device.

        Call it for each step of the cache, in order. The host does not wait: the work is on the
        current stream, after the kernels that read the tables of the step before. Cost: one copy,
        and one kernel for each table that changed.

        Returns:
            The step, with `rows`, `seq_lens`, `slot_mapping` and `state_slots` on the device.
        """
        changes = {name: (change.places, change.slots) for name, change in step.changes.items()}
        changed = {name: pair for name, pair in changes.items() if len(pair[0])}
        there = iter(
            self._copied(
                [
                    step.rows,
                    step.seq_lens,
                    *step.slot_mapping.values(),
                    *step.state_slots.values(),
                    *[each for pair in changed.values() for each in pair],
                ]
            )
        )
        moved = step._replace(
            rows=next(there),
            seq_lens=next(there),
            slot_mapping={name: next(there) for name in step.slot_mapping},
            state_slots={name: next(there) for name in step.state_slots},
        )
        for name in changed:
            self.tables[name].view(-1).index_copy_(0, next(there), next(there))
        return moved

    def _copied(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies on the device: views of one. The host's is torch's again once that has run."""
        starts = [0, *accumulate(-(-each.nbytes // ALIGNMENT) * ALIGNMENT for each in tensors)]
        together = torch.empty(
            starts[-1], dtype=torch.uint8, pin_memory=self.device.type not in {"cpu", "meta"}
        )
        parts = [slice(start, start + each.nbytes) for start, each in zip(starts, tensors)]
        buffer = together.numpy()
        for part, each in zip(parts, tensors):
            buffer[part] = each.numpy().view(np.uint8)
        there = together.to(self.device, non_blocking=True)
        return [there[part].view(each.dtype) for part, each in zip(parts, tensors)]
