"""Bytes that say which tokens they were computed from.

Every row a request computes is stamped with a number for (namespace, tokens up to there,
component, plane); a row is right if it carries the number of the prefix it is used for, wherever
it was copied in between. Rows nobody owns are poisoned.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .brute_force import BruteForce, ModelComponent, Prefix

__all__ = ["Payloads"]

POISON = -7
PLANES, SUBSLOTS, LANES = 16, 8, 64


class _Rows:
    """One plane of one pool as a writable numpy view."""

    def __init__(self, lanes: object, constant: int) -> None:
        self.view: npt.NDArray[np.int64] = lanes.numpy()  # type: ignore[attr-defined]
        assert self.view.dtype == np.int64, "give planes whose rows are multiples of 8 bytes"
        assert self.view.shape[1] <= LANES
        self.offsets = constant * LANES + np.arange(self.view.shape[1], dtype=np.int64)

    def expected(self, stamps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return stamps[:, None] * (PLANES * LANES) + self.offsets


class Payloads:
    """Stamps and checks the pools of one cache."""

    def __init__(self, cache: object, model: BruteForce) -> None:
        self._numbers: dict[Prefix, int] = {}
        self._planes: dict[tuple[str, str], list[_Rows]] = {}
        self._allocators: dict[tuple[str, str], object] = {}
        self.pool_of: dict[int, tuple[str, str]] = {}
        constants: dict[tuple[str, int, str], int] = {}
        for mounted in cache.mounted:  # type: ignore[attr-defined]
            component = mounted.component
            for tier, pool in (("device", component.device), ("host", component.host)):
                if pool is None:
                    continue
                rows = []
                for spec, lanes in zip(pool.specs, pool.lanes):
                    key = (mounted.name, spec.layer, spec.name)
                    constant = constants.setdefault(key, len(constants))
                    rows.append(_Rows(lanes, constant))
                    self.pool_of[id(lanes)] = (mounted.name, tier)
                self._planes[mounted.name, tier] = rows
                self._allocators[mounted.name, tier] = pool.allocator
        assert len(constants) <= PLANES
        self.model = model

    def _stamp(self, prefix: Prefix) -> int:
        return self._numbers.setdefault(prefix, len(self._numbers) + 1) * SUBSLOTS

    def write(
        self, component: ModelComponent, tier: str, prefix: Prefix, slots: Sequence[int]
    ) -> None:
        """Compute a page, or a state, into its slots."""
        stamp = self._stamp(prefix)
        stamps = np.arange(stamp, stamp + len(slots), dtype=np.int64)
        for rows in self._planes[component.name, tier]:
            rows.view[np.asarray(slots)] = rows.expected(stamps)

    def check(
        self,
        component: ModelComponent,
        tier: str,
        pages: dict[Prefix, tuple[int, ...]],
        purpose: str,
    ) -> None:
        """Raise unless every slot holds the bytes of the page it stands for."""
        if not pages:
            return
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
                raise AssertionError(
                    f"{purpose}: component {component.name!r} {tier} slot {slots[position]} "
                    f"should hold {prefix}, it holds {self._decode(int(found[position][0]))}"
                )

    def _decode(self, value: int) -> str:
        if value == POISON:
            return "what nobody owns"
        number = value // (PLANES * LANES * SUBSLOTS)
        for prefix, own in self._numbers.items():
            if own == number:
                return str(prefix)
        return f"bytes never computed ({value})"

    def free(self, name: str, tier: str) -> set[int]:
        """Slots of a pool that nobody owns."""
        return set(self._allocators[name, tier].free_slots())  # type: ignore[attr-defined]

    def poison(self) -> None:
        """Overwrite every row that nobody owns."""
        for key, planes in self._planes.items():
            free = self._allocators[key].free_slots()  # type: ignore[attr-defined]
            for rows in planes:
                rows.view[free] = POISON
