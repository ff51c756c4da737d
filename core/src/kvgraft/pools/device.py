"""Device pools: tensors in layer order over a set of slots."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.devices import DeviceRuntime, PlaneCopy
from kvgraft.errors import ConfigError
from kvgraft.optional import load_part
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.pools.plan import PlannedMemory, plan_memory
from kvgraft.pools.planes import PlaneSpec, lane_dtype, plane_nbytes
from kvgraft.types import Tier

PLANE_ALIGNMENT = 512
"""Bytes to which every plane of a stack is aligned, as torch aligns memory on devices."""

MOVED_NBYTES = 256 << 20
"""Most bytes that a copy on a device gathers at a time: memory that it takes beside the pool."""


def stack_lanes(lanes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rows of planes `[n_slots, n_lanes]` as few tensors `[n_planes, n_slots, n_lanes]`.

    Planes share a stack if they have one shape and element type and lie in one piece of memory at
    equal distances, as in our own pools and in an engine's tensor with a row per layer. Views, no
    copies; together they cover every plane once.
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


slot_numbers = struct.Struct("i").iter_unpack
"""The slots in bytes, each a tuple of its number."""


def slot_index(slots: bytes, device: torch.device | str = "cpu") -> torch.Tensor:
    """Slots as an int64 `[n]` index tensor on `device`."""
    index = torch.from_numpy(np.frombuffer(slots, dtype=np.int32).astype(np.int64))
    return index if str(device) == "cpu" else index.to(device, non_blocking=True)


class DevicePool:
    """Slots on one device, laid out plane by plane in layer order.

    Memory is taken when all pools of a cache are known to fit, or at its first use. Planes of equal
    shape and element type share one tensor, so that copies of slots cost a few calls for each kind
    of plane, and not for each plane.

    Args:
        specs: the planes of one slot.
        n_slots: capacity.
        device: torch device.
        tensors: tensors to use instead of allocating, one per spec, `[n_slots, *spec.shape]`, so
            that kvgraft can sit under an engine that owns its memory.

    Attributes:
        device: torch device; `meta` in a cache without payload.
        planned: the memory that it takes; None over tensors of an engine.
        allocator: which slots are free. With one budget for several pools it is the arena's own,
            and the tensors have a row for every possible slot.
        on_copy: called with sources and targets, both int32 `[n]` as bytes, to copy slots where an
            engine owns the memory; None where the pool copies them itself.

    Raises:
        ConfigError: a tensor of another shape, dtype or device than its spec says.
    """

    def __init__(
        self,
        specs: Sequence[PlaneSpec],
        n_slots: int,
        device: torch.device | str = "cpu",
        tensors: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self.device = torch.device(device)
        self.planned: PlannedMemory | None = None
        self.on_copy: Callable[[bytes, bytes], None] | None = None
        self._spaces: dict[Any, int] = {}
        """With the bytes of a slot in one plane."""
        if tensors is None:
            nbytes = n_slots * self.slot_nbytes
            memory = plan_memory(Tier.DEVICE, self.device, nbytes, lambda: self.lanes)
            self.planned, self.device = memory, memory.device
            self.allocator = memory.allocator(n_slots, self.slot_nbytes)
        else:
            self.allocator = SlotAllocator(n_slots)
            self.planes = list(tensors)
            self._check_tensors(n_slots)

    @cached_property
    def planes(self) -> list[torch.Tensor]:
        """Tensors `[n_slots, *shape]` in the order of `specs`, contiguous."""
        assert self.planned is not None
        kinds = Counter((spec.shape, spec.dtype) for spec in self.specs)
        made: dict[object, Iterator[torch.Tensor]] = {}
        for (shape, dtype), n_planes in kinds.items():
            stack = self.planned.take(partial(self._zeros, shape, dtype, n_planes))
            made[shape, dtype] = iter(stack)
        return [next(made[spec.shape, spec.dtype]) for spec in self.specs]

    @cached_property
    def lanes(self) -> list[torch.Tensor]:
        """The same memory as integer rows `[n_slots, n_lanes]`, for copies."""
        return [_as_lanes(plane) for plane in self.planes]

    @cached_property
    def _stacks(self) -> list[torch.Tensor]:
        return stack_lanes(self.lanes)

    @cached_property
    def _arrays(self) -> list[npt.NDArray[np.void]] | None:
        """Stacks by slot, `[n_slots, n_planes]`: an index alone names one's planes.

        A row of a plane is one element: numpy sees at once that two slots share no memory, and
        copies from the one to the other. None but on the CPU.
        """
        if self.device.type != "cpu":
            return None
        stacks = [stack.numpy() for stack in self._stacks]
        return [each.view(f"V{each[0, 0].nbytes}")[:, :, 0].T for each in stacks]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, n_planes: int) -> torch.Tensor:
        """Planes of one kind, `[n_planes, n_slots, *shape]`."""
        allocator, n_slots = self.allocator, self.allocator.capacity
        row_nbytes = plane_nbytes(PlaneSpec(0, "", shape, dtype))
        assert self.planned is not None
        limit = self.planned.limit_slots
        if limit is not None:
            n_slots = limit
        nbytes = n_slots * row_nbytes
        if limit is not None and self.device.type != "meta":
            space = load_part("memory").reserve(nbytes, self.device, n_planes)
            space.resize(allocator.end * row_nbytes)
            self._spaces[space] = row_nbytes
            memory: torch.Tensor = space.tensor()
        else:
            stride = -(-nbytes // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
            if self._runtime is None:
                memory = torch.zeros((n_planes, stride), dtype=torch.uint8, device=self.device)
            else:
                label = f"{self.planned.component!r} on DEVICE"
                memory = self._runtime.zeros((n_planes, stride), torch.uint8, label)
        return memory[:, :nbytes].view(dtype).view(n_planes, n_slots, *shape)

    @property
    def _runtime(self) -> DeviceRuntime | None:
        """The device that took the memory; None for torch, or over tensors of an engine."""
        return None if self.planned is None else self.planned.runtime

    @property
    def slack_nbytes(self) -> int:
        """Most bytes that it takes beyond those of its slots: devices map whole blocks."""
        return sum(space.slack_nbytes for space in self._spaces)

    def resize(self, n_slots: int) -> None:
        """Take memory for the first `n_slots` slots, and free the rest (K7).

        Raises:
            MemoryError: the device lacks memory; all slots keep theirs.
        """
        for space, row_nbytes in self._spaces.items():
            space.resize(n_slots * row_nbytes)

    def _check_tensors(self, n_slots: int) -> None:
        if len(self.planes) != len(self.specs):
            raise ConfigError(f"pool: {len(self.planes)} tensors for {len(self.specs)} planes")
        for spec, tensor in zip(self.specs, self.planes):
            want = (n_slots, *spec.shape)
            if tuple(tensor.shape) != want or tensor.dtype != spec.dtype:
                raise ConfigError(
                    f"pool: layer {spec.layer} plane {spec.name!r} is {tuple(tensor.shape)} "
                    f"{tensor.dtype}; expected {want} {spec.dtype}"
                )
            if tensor.device.type != self.device.type or not tensor.is_contiguous():
                raise ConfigError(
                    f"pool: layer {spec.layer} plane {spec.name!r} must be contiguous on "
                    f"{self.device}, it is on {tensor.device}"
                )

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return self.allocator.capacity

    @property
    def slot_nbytes(self) -> int:
        """Bytes of one slot over all planes."""
        return sum(plane_nbytes(spec) for spec in self.specs)

    def copy_slots(self, source: bytes, target: bytes) -> None:
        """Copy whole slots within the pool; in stream order with the device's other work (M8).

        No slot is both a source and a target, and none is a target twice. On a device it costs a
        few calls for each kind of plane, however many slots there are.
        """
        arrays = self._arrays
        if self.on_copy is not None:
            self.on_copy(source, target)
        elif arrays is not None:
            # Assigning views takes a tenth of the time of an indexed torch copy.
            for (row,), (into,) in zip(slot_numbers(source), slot_numbers(target)):
                for planes in arrays:
                    planes[into] = planes[row]
        elif self._runtime is not None:
            rows, lanes = (slot_index(source), slot_index(target)), zip(self.specs, self.lanes)
            copies = [PlaneCopy(spec.layer, each, each, *rows) for spec, each in lanes]
            self._runtime.compute().copy([copies])
        elif self.device.type != "meta":
            read, write = slot_index(source, self.device), slot_index(target, self.device)
            for stack in self._stacks:
                copy_rows(stack, read, write)

    def plane(self, layer: int, name: str) -> torch.Tensor:
        """The tensor `[n_slots, *shape]` of one layer's plane."""
        for spec, tensor in zip(self.specs, self.planes):
            if (spec.layer, spec.name) == (layer, name):
                return tensor
        known = sorted({spec.name for spec in self.specs})
        raise ConfigError(f"pool: no plane {name!r} on layer {layer}; planes are {known}")


def _as_lanes(plane: torch.Tensor) -> torch.Tensor:
    rows = plane.reshape(plane.shape[0], -1)
    nbytes = rows.shape[1] * rows.element_size()
    return rows.view(torch.uint8).view(lane_dtype(nbytes))
