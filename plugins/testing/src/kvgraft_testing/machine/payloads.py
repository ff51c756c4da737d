"""Bytes that identify the tokens they were computed from.

Every row a request computes is stamped with a number for (namespace, tokens up to there, slot of
the page) and for the plane and the place in the row; a row is right if it carries the number of the
prefix it is used for, wherever it was copied in between. Free rows are poisoned. In a wide row a
few places, evenly spread, are stamped.

A component that builds its copies itself may cut and join rows on the way to HOST and back; its
rows are filled with one byte each, which survives that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.cache import Cache
from kvgraft.errors import ContractViolation
from kvgraft.packages.dispatch import Mounted
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.transfers import Fence, PlaneCopy
from kvgraft.transfers.engine import fences_of
from kvgraft.tree.component import TreeComponent
from kvgraft.types import Tier
from kvgraft_testing.machine.brute_force import Gone, ModelComponent, Prefix
from kvgraft_testing.machine.engines import Point, Submission
from kvgraft_testing.machine.memory import Rows, plain, rows_of
from kvgraft_testing.simulated import SimulatedDevice

__all__ = ["Payloads", "Wrong"]

POISON = -7
LANES = 8
"""Most places of a row that are stamped."""

MIXED = np.int64(-7046029254386353131)
"""An odd number near 2^64 / golden ratio: its multiples differ in every byte, so that a narrow
place of a row tells stamps apart too."""


ONE_BYTE = np.int64(0x0101010101010101)


class Wrong(NamedTuple):
    """A slot with wrong content.

    Attributes:
        slot: which.
        plane: layer and plane of the bytes that are wrong.
        wanted: the content last computed into it or copied there.
        holds: its actual content.
    """

    slot: int
    plane: str
    wanted: str
    holds: str
    prefix: Prefix

    def __str__(self) -> str:
        return f"slot {self.slot}, {self.plane}, should hold {self.wanted}; it holds {self.holds}"


def _told(prefix: Prefix, sub_slot: int, sub_slots: int) -> str:
    """A request's data in words: its tokens, up to and including the page's own."""
    namespace, tokens = prefix
    told = "".join(map(str, tokens)) if all(0 <= each < 10 for each in tokens) else str(tokens)
    part = f", slot {sub_slot + 1} of the page's {sub_slots}" if sub_slots > 1 else ""
    where = "" if namespace is None else f" in namespace {namespace!r}"
    return f"the page that ends the {len(tokens)} tokens {told}{where}{part}"


def _storage(rows: torch.Tensor) -> int:
    """The memory a tensor looks at."""
    return plain(rows).untyped_storage().data_ptr()


class _Rows:
    """One plane of one pool, its rows to write and to look at."""

    def __init__(
        self, lanes: torch.Tensor, plane: int, n_planes: int, told: str, *, one_byte: bool
    ) -> None:
        self.told = told
        self.lanes = lanes
        self.width, self.every = lanes.shape[1], max(1, -(-lanes.shape[1] // LANES))
        self.home = plain(lanes).device
        self.view: Rows = rows_of(plain(lanes)[:, :: self.every])
        self.dtype = self.view.dtype
        self.poison = np.array(POISON, dtype=np.int64).astype(self.dtype)
        self.one_byte = one_byte
        self.wide = self.dtype == np.int64
        self.scale = np.int64(n_planes * LANES)
        self.offsets = np.arange(self.view.shape[1], dtype=np.int64) + plane * LANES

    def expected(self, stamps: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """The rows that carry some stamps."""
        numbers: npt.NDArray[Any] = stamps[:, None] * self.scale + self.offsets
        if self.one_byte:
            filled = (stamps % 241 + 1) * ONE_BYTE
            return np.broadcast_to(filled[:, None], numbers.shape).astype(self.dtype)
        if self.wide:
            return numbers
        mixed: npt.NDArray[Any] = ((numbers * MIXED) >> 32).astype(self.dtype)
        return mixed


def _nothing(*rows: torch.Tensor) -> None:
    """The bytes of a step are there already."""


class Payloads:
    """Stamps and checks the pools of one cache.

    Args:
        cache: the cache.
        device: a simulated one, which gets the model's steps; None on others.

    Attributes:
        pool_of: component and tier by `id` of a plane's lanes.
    """

    def __init__(self, cache: Cache, device: SimulatedDevice | None = None) -> None:
        self._device = device
        self._numbers: dict[Prefix, int] = {}
        self._planes: dict[tuple[str, str], list[_Rows]] = {}
        self._allocators: dict[tuple[str, str], SlotAllocator] = {}
        self.pool_of: dict[int, tuple[str, str]] = {}
        self._storages: dict[int, set[tuple[str, str]]] = {}
        self._layers: dict[int, int] = {}
        self._computed: dict[tuple[str, str], npt.NDArray[np.int64]] = {}
        self._sub_slots = max(each.component.slots_per_page for each in cache.mounted)
        planes = self._number_planes(cache.mounted)
        self._specs = {each.name: each.component.device.specs for each in cache.mounted}
        for mounted in cache.mounted:
            component = mounted.component
            own_copies = mounted.transfer_hooks is not None
            for tier, pool in (("device", component.device), ("host", component.host)):
                if pool is None:
                    continue
                self._planes[mounted.name, tier] = [
                    _Rows(
                        lanes,
                        planes[mounted.name, spec.layer, spec.name],
                        len(planes),
                        f"layer {spec.layer} plane {spec.name!r}",
                        one_byte=own_copies,
                    )
                    for spec, lanes in zip(pool.specs, pool.lanes)
                ]
                for spec, lanes in zip(pool.specs, pool.lanes):
                    self.pool_of[id(lanes)] = (mounted.name, tier)
                    self._layers[id(lanes)] = spec.layer
                    owners = self._storages.setdefault(_storage(lanes), set())
                    owners.add((mounted.name, tier))
                self._allocators[mounted.name, tier] = pool.allocator
                rows = max((len(lanes) for lanes in pool.lanes), default=pool.allocator.capacity)
                self._computed[mounted.name, tier] = np.zeros(rows, dtype=np.int64)

    @staticmethod
    def _number_planes(mounted: Sequence[Mounted]) -> dict[tuple[str, int, str], int]:
        """A number for each plane; pool and mirror agree on those they share."""
        numbers: dict[tuple[str, int, str], int] = {}
        for each in mounted:
            for pool in (each.component.device, each.component.host):
                for spec in pool.specs if pool is not None else ():
                    numbers.setdefault((each.name, spec.layer, spec.name), len(numbers))
        return numbers

    def _stamp(self, prefix: Prefix) -> int:
        if isinstance(prefix[0], Gone):
            prefix = (prefix[0].namespace, prefix[1])
        return self._numbers.setdefault(prefix, len(self._numbers) + 1) * self._sub_slots

    def write(
        self, component: ModelComponent, tier: str, prefix: Prefix, slots: Sequence[int], step: int
    ) -> None:
        """Compute a page, or a state, into its slots: the model's step of that number."""
        self._computed[component.name, tier][list(slots)] = step
        stamp = self._stamp(prefix)
        stamps = np.arange(stamp, stamp + len(slots), dtype=np.int64)
        for rows in self._planes[component.name, tier]:
            rows.view[np.asarray(slots)] = rows.expected(stamps)
        if self._device is not None:
            touched = self._touched(component, tier, slots)
            self._device.launch(f"step {step} of the model", _nothing, writes=touched)

    def read(self, component: ModelComponent, tier: str, slots: Sequence[int]) -> None:
        """The model's next step reads some slots."""
        if self._device is not None:
            touched = self._touched(component, tier, slots)
            self._device.launch("attention of the model", _nothing, reads=touched)

    def _touched(
        self, component: ModelComponent, tier: str, slots: Sequence[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        numbers = torch.tensor(list(slots), dtype=torch.int64)
        return [(rows.lanes, numbers) for rows in self._planes[component.name, tier]]

    def planes(self, component: ModelComponent, prefix: Prefix) -> list[torch.Tensor]:
        """A state computed for a prefix, one tensor for each plane of its pool."""
        stamps = np.array([self._stamp(prefix)], dtype=np.int64)
        made = []
        specs = self._specs[component.name]
        for spec, rows in zip(specs, self._planes[component.name, "device"]):
            row = np.zeros((1, rows.width), dtype=rows.dtype)
            row[:, :: rows.every] = rows.expected(stamps)
            plane = torch.from_numpy(row).view(torch.uint8).view(spec.dtype)
            made.append(plane.reshape(tuple(spec.shape)).to(rows.home))
        return made

    def wrong(
        self, component: ModelComponent, tier: str, pages: dict[Prefix, tuple[int, ...]]
    ) -> Wrong | None:
        """The first slot that does not hold its page's bytes."""
        if not pages or (component.own_copies and tier == "host"):
            return None
        slots: list[int] = []
        stamps: list[int] = []
        for prefix, numbers in pages.items():
            stamp = self._stamp(prefix)
            slots += numbers
            stamps += range(stamp, stamp + len(numbers))
        wanted = np.asarray(stamps, dtype=np.int64)
        for rows in self._planes[component.name, tier]:
            found = rows.view[slots]
            right = found == rows.expected(wanted)
            if not right.all():
                position = int(np.flatnonzero(~right.all(axis=1))[0])
                owners = [(key, at) for key, numbers in pages.items() for at in range(len(numbers))]
                prefix, at = owners[position]
                should = _told(prefix, at, len(pages[prefix]))
                holds = self._decode(component.name, tier, rows, found[position])
                return Wrong(slots[position], rows.told, should, holds, prefix)
        return None

    def _decode(self, name: str, tier: str, rows: _Rows, found: npt.NDArray[Any]) -> str:
        """The meaning of bytes, read as this plane's or as another's of the pool."""
        if (found == rows.poison).all():
            return "rows without an owner: it was never written, or freed meanwhile"
        said = self._owner_of(rows, found)
        if said is not None:
            return said
        for other in self._planes[name, tier]:
            if len(other.offsets) == len(found) and other.dtype == rows.dtype:
                said = self._owner_of(other, found)
                if said is not None:
                    return f"{said}, but of {other.told}"
        return "bytes that no request computed"

    def _owner_of(self, rows: _Rows, found: npt.NDArray[Any]) -> str | None:
        stamps = np.arange((len(self._numbers) + 1) * self._sub_slots, dtype=np.int64)
        for stamp in np.flatnonzero((rows.expected(stamps) == found).all(axis=1)):
            number, sub_slot = divmod(int(stamp), self._sub_slots)
            for prefix, own in self._numbers.items():
                if own == number:
                    return _told(prefix, sub_slot, self._sub_slots)
        return None

    def misread(self, submission: Submission) -> ContractViolation | None:
        """The fault in the places copies read, or in the layers they name."""
        written: set[int] = set()
        for copy in submission.ticket.copies:
            storage = _storage(copy.source)
            owners = self._storages.get(storage, set()) | self._storages.get(
                _storage(copy.target), set()
            )
            name = min((name for name, _ in owners), default=None)
            if storage not in self._storages and storage not in written:
                said = "a copy reads memory that is no pool's, filled when the copies were built"
                return ContractViolation("B3", name, said)
            for lanes in (copy.source, copy.target):
                layer = self._layers.get(id(lanes), copy.layer)
                if layer != copy.layer:
                    said = f"a copy of layer {layer} is announced as one of layer {copy.layer}"
                    return ContractViolation("R7", name, said)
            early = self._early(copy, submission.fence)
            if early is not None:
                return ContractViolation("B4", name, early)
            written.add(_storage(copy.target))
        for copy in submission.ticket.copies:
            self._note_arrival(copy)
        return None

    def _note_arrival(self, copy: PlaneCopy) -> None:
        """Note loaded slots: their data was not computed here, even if older data was."""
        owners = self._storages.get(_storage(copy.target), set())
        for name, tier in owners if len(owners) == 1 else ():
            computed = self._computed[name, tier]
            if tier == "device" and len(copy.target) == len(computed):
                computed[copy.target_rows.numpy()] = 0

    def _early(self, copy: PlaneCopy, fence: Fence | None) -> str | None:
        """Why a backup may start before its source is computed."""
        owners = self._storages.get(_storage(copy.source), set())
        if len(owners) != 1:
            return None
        ((name, tier),) = owners
        computed = self._computed[name, tier]
        if tier != "device" or len(copy.source) != len(computed):
            return None
        rows = copy.source_rows.numpy()
        if not len(rows) or rows.min() < 0 or rows.max() >= len(computed):
            return None
        latest = int(computed[rows].max())
        reached = max(
            (each.number for each in fences_of(fence) if isinstance(each, Point)), default=0
        )
        if self._storages.get(_storage(copy.target), set()) & owners or latest <= reached:
            return None
        waits = f"waits for step {reached}" if reached else "waits for no step"
        slots = sorted(set(rows.tolist()))
        return f"a copy of device slots {slots} {waits} of the model; step {latest} computes them"

    def free(self, name: str, tier: str) -> set[int]:
        """Free slots of a pool."""
        return set(self._allocators[name, tier].free_slots())

    def moved(self, tier: Tier, component: TreeComponent, source: bytes, target: bytes) -> None:
        """Slots moved: their new rows are as late as the old ones."""
        old, new = (np.frombuffer(slots, np.int32) for slots in (source, target))
        computed = self._computed[component.name, tier.value]
        computed[new] = computed[old]

    def left(self, tier: Tier, component: TreeComponent, source: bytes) -> None:
        """The old rows of slots that moved are free: overwrite them (K7)."""
        for rows in self._planes[component.name, tier.value]:
            rows.view[np.frombuffer(source, np.int32)] = rows.poison

    def poison(self) -> None:
        """Overwrite every free row."""
        for key, planes in self._planes.items():
            allocator = self._allocators[key]
            free = allocator.free_slots()
            if not allocator.closing and len(planes):
                free += range(allocator.end, len(planes[0].view))
            for rows in planes:
                rows.view[free] = rows.poison
