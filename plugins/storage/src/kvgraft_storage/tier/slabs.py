"""HOST slots as memory that a store reads and writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.packages.dispatch import Mounted
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import Ledger
from kvgraft_storage import StorageTicket
from kvgraft_storage.memory import Buffers

__all__ = ["Draining", "Rows", "Slabs"]


class Draining(NamedTuple):
    """Slots that an abandoned call may still write to; free once its ticket is done."""

    ticket: StorageTicket
    slots: list[tuple[Ledger, bytes]]
    nbytes: int


class Rows(Buffers):
    """The memory of some slots, looked up on a worker's thread.

    Args:
        parts: per component, all its rows and the wanted slots, int32 `[n]`.
    """

    def __init__(self, parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return sum(len(slots) for _, slots in self.parts)

    def __getitem__(self, part: slice) -> list[memoryview]:
        low, high, _ = part.indices(len(self))
        found: list[memoryview] = []
        for rows, slots in self.parts:
            mine = slots[max(low, 0) : max(high, 0)].tolist()
            found += [memoryview(rows[slot]).cast("B") for slot in mine]
            low, high = low - len(slots), high - len(slots)
        return found

    def sizes(self) -> Iterable[int]:
        return chain.from_iterable(repeat(rows.shape[1], len(slots)) for rows, slots in self.parts)


class Slabs:
    """The memory of every component's HOST slots: one payload a slot, all its planes in it."""

    def __init__(self, mounted: Sequence[Mounted]) -> None:
        self._rows = []
        self.nbytes: list[int] = []
        for each in mounted:
            mirror = each.component.host
            assert mirror is not None
            self._rows.append(mirror.slab.numpy())
            self.nbytes.append(mirror.slab_nbytes)

    def of(self, parts: Sequence[tuple[TreeComponent, npt.NDArray[np.int32]]]) -> Rows:
        """The memory of some components' slots, in their order."""
        return Rows([(self._rows[component.index], slots) for component, slots in parts])
