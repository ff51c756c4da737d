"""Host mirrors: one contiguous aligned slab per slot, all planes inside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from kvgraft.errors import ConfigError
from kvgraft.optional import load_part
from kvgraft.pools.device import slot_index
from kvgraft.pools.plan import CPU, PlannedMemory, plan_memory
from kvgraft.pools.planes import PlaneSpec, lane_dtype, plane_nbytes
from kvgraft.types import Tier

SLAB_ALIGNMENT = 64
"""Bytes to which every slab, and every plane inside it, is aligned (a cache line)."""

BLOCK_NBYTES = 4096
"""Bytes to which the memory and large slabs are aligned, so that disks read into them directly."""

LARGE_NBYTES = 16 * BLOCK_NBYTES
"""Bytes from which on a slab is large: rounding it up to whole blocks adds 6 % at most."""


def _aligned(nbytes: int, alignment: int = SLAB_ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


def _blocks(n_slots: int, stride: int, planned: PlannedMemory, *, pin: bool) -> torch.Tensor:
    """Zeroed memory `[n_slots, stride]` that begins at a block."""
    if planned.device.type == "meta":
        return torch.empty((n_slots, stride), dtype=torch.uint8, device="meta")
    nbytes = n_slots * stride + BLOCK_NBYTES
    if planned.runtime is not None:
        memory = planned.runtime.page_locked(nbytes, f"{planned.component!r} on HOST")
    else:
        memory = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin)
    first = -memory.data_ptr() % BLOCK_NBYTES
    return memory[first : first + n_slots * stride].view(n_slots, stride)


class HostMirror:
    """Page-first host memory: slot by slot, every layer's planes side by side.

    The memory begins at a block of 4 KiB; slabs of 64 KiB and more are whole blocks. It is taken
    when all pools of a cache are known to fit, or at its first use.

    Args:
        specs: the planes of one slot, normally those of the device pool.
        n_slots: capacity.
        pin: page-lock the memory, for copies that overlap with compute on a CUDA device.

    Attributes:
        planned: the memory that it takes.
        allocator: which slots are free.
    """

    def __init__(self, specs: Sequence[PlaneSpec], n_slots: int, *, pin: bool = False) -> None:
        self.specs = tuple(specs)
        self.offsets: list[int] = []
        offset = 0
        for spec in self.specs:
            self.offsets.append(offset)
            offset = _aligned(offset + plane_nbytes(spec))
        self._slab_nbytes = _aligned(offset, BLOCK_NBYTES) if offset >= LARGE_NBYTES else offset
        self._pin = pin
        nbytes = n_slots * self.slab_nbytes + BLOCK_NBYTES
        self.planned = plan_memory(Tier.HOST, CPU, nbytes, lambda: self.lanes, is_locked=pin)
        self.allocator = self.planned.allocator(n_slots, self.slab_nbytes)
        self._space: Any = None

    @cached_property
    def slab(self) -> torch.Tensor:
        """All slots, uint8 `[n_slots, slab_nbytes]`."""
        memory, allocator = self.planned, self.allocator
        n_slots, stride = allocator.capacity, self.slab_nbytes
        if memory.limit_slots is not None:
            n_slots = memory.limit_slots
            if memory.device.type != "meta":
                # it begins at a block
                self._space = load_part("memory").reserve(n_slots * stride, CPU)
                reserved = self._space.tensor()[0].view(n_slots, stride)
                return memory.take(lambda: reserved)
        return memory.take(lambda: _blocks(n_slots, stride, memory, pin=self._pin))

    @cached_property
    def lanes(self) -> list[torch.Tensor]:
        """Per plane, its integer rows `[n_slots, n_lanes]` (views into the slab)."""
        return [
            self._lanes(start, plane_nbytes(spec)) for start, spec in zip(self.offsets, self.specs)
        ]

    def _lanes(self, start: int, nbytes: int) -> torch.Tensor:
        dtype = lane_dtype(nbytes)
        lanes = self.slab.view(dtype)
        first = start // dtype.itemsize
        return lanes[:, first : first + nbytes // dtype.itemsize]

    @property
    def slab_nbytes(self) -> int:
        """Bytes of one slot, alignment included."""
        return self._slab_nbytes

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.allocator.capacity

    def copy_slots(self, source: bytes, target: bytes) -> None:
        """Copy whole slots within the mirror."""
        if self.planned.device.type != "meta":
            self.slab[slot_index(target)] = self.slab[slot_index(source)]

    @property
    def slack_nbytes(self) -> int:
        """Most bytes that it takes beyond those of its slots."""
        return 0 if self._space is None else self._space.slack_nbytes

    def resize(self, n_slots: int) -> None:
        """Free the memory of slots from `n_slots` on (K7)."""
        if self._space is not None:
            self._space.resize(n_slots * self.slab_nbytes)

    def plane(self, layer: int, name: str) -> torch.Tensor:
        """One layer's plane as a strided view `[n_slots, *shape]` into the slabs."""
        for spec, start in zip(self.specs, self.offsets):
            if (spec.layer, spec.name) == (layer, name):
                rows = self.slab[:, start : start + plane_nbytes(spec)].view(spec.dtype)
                return rows.view(-1, *spec.shape)
        known = sorted({spec.name for spec in self.specs})
        raise ConfigError(f"host mirror: no plane {name!r} on layer {layer}; planes are {known}")
