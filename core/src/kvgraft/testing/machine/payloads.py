"""Bytes that say which tokens they were computed from.

Every row a request computes is stamped with a number for (namespace, tokens up to there, slot of
the page) and for the plane and the place in the row; a row is right if it carries the number of
the prefix it is used for, wherever it was copied in between. Rows nobody owns are poisoned. Of a
wide row a few places, evenly spread, stand for all.

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
from kvgraft.dispatch import Mounted
from kvgraft.slots import SlotAllocator
from kvgraft.testing.machine.brute_force import ModelComponent, Prefix

__all__ = ["Payloads", "Wrong"]

POISON = -7
LANES = 8
"""Most places of a row that are stamped."""

MIXED = np.int64(-7046029254386353131)
"""An odd number near 2^64 / golden ratio: its multiples differ in every byte, so that a narrow
place of a row tells stamps apart too."""


ONE_BYTE = np.int64(0x0101010101010101)


class Wrong(NamedTuple):
    """A slot that does not hold what it should."""

    slot: int
    prefix: Prefix
    holds: str

    def __str__(self) -> str:
        return f"slot {self.slot} should hold {self.prefix}, it holds {self.holds}"


class _Rows:
    """One plane of one pool as a writable numpy view of its rows."""

    def __init__(self, lanes: torch.Tensor, plane: int, n_planes: int, *, one_byte: bool) -> None:
        rows: npt.NDArray[Any] = lanes.numpy()
        self.view = rows[:, :: max(1, -(-rows.shape[1] // LANES))]
        self.dtype = rows.dtype
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


class Payloads:
    """Stamps and checks the pools of one cache.

    Attributes:
        pool_of: component and tier by `id` of a plane's lanes.
    """

    def __init__(self, cache: Cache) -> None:
        self._numbers: dict[Prefix, int] = {}
        self._planes: dict[tuple[str, str], list[_Rows]] = {}
        self._allocators: dict[tuple[str, str], SlotAllocator] = {}
        self.pool_of: dict[int, tuple[str, str]] = {}
        self._sub_slots = max(each.component.slots_per_page for each in cache.mounted)
        planes = self._number_planes(cache.mounted)
        for mounted in cache.mounted:
            component = mounted.component
            own_copies = mounted.build_hicache_transfers is not None
            for tier, pool in (("device", component.device), ("host", component.host)):
                if pool is None:
                    continue
                self._planes[mounted.name, tier] = [
                    _Rows(
                        lanes,
                        planes[mounted.name, spec.layer, spec.name],
                        len(planes),
                        one_byte=own_copies,
                    )
                    for spec, lanes in zip(pool.specs, pool.lanes)
                ]
                for lanes in pool.lanes:
                    self.pool_of[id(lanes)] = (mounted.name, tier)
                self._allocators[mounted.name, tier] = pool.allocator

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
        return self._numbers.setdefault(prefix, len(self._numbers) + 1) * self._sub_slots

    def write(
        self, component: ModelComponent, tier: str, prefix: Prefix, slots: Sequence[int]
    ) -> None:
        """Compute a page, or a state, into its slots."""
        stamp = self._stamp(prefix)
        stamps = np.arange(stamp, stamp + len(slots), dtype=np.int64)
        for rows in self._planes[component.name, tier]:
            rows.view[np.asarray(slots)] = rows.expected(stamps)

    def wrong(
        self, component: ModelComponent, tier: str, pages: dict[Prefix, tuple[int, ...]]
    ) -> Wrong | None:
        """The first slot that does not hold the bytes of the page it stands for."""
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
                prefix = [key for key, numbers in pages.items() for _ in numbers][position]
                return Wrong(slots[position], prefix, self._decode(rows, found[position]))
        return None

    def _decode(self, rows: _Rows, found: npt.NDArray[Any]) -> str:
        if (found == rows.poison).all():
            return "what nobody owns"
        stamps = np.arange((len(self._numbers) + 1) * self._sub_slots, dtype=np.int64)
        same = np.flatnonzero((rows.expected(stamps) == found).all(axis=1))
        for number in same // self._sub_slots:
            for prefix, own in self._numbers.items():
                if own == number:
                    return str(prefix)
        return "bytes of another plane, or never computed"

    def free(self, name: str, tier: str) -> set[int]:
        """Slots of a pool that nobody owns."""
        return set(self._allocators[name, tier].free_slots())

    def poison(self) -> None:
        """Overwrite every row that nobody owns."""
        for key, planes in self._planes.items():
            free = self._allocators[key].free_slots()
            for rows in planes:
                rows.view[free] = rows.poison
