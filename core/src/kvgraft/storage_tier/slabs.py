"""HOST slots as memory that a store reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraft.dispatch import Mounted
from kvgraft.storage import StorageTicket
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.track import Track

__all__ = ["Draining", "Slabs"]


class Draining(NamedTuple):
    """Slots that a call given up may still write to; free once its ticket is done."""

    ticket: StorageTicket
    slots: list[tuple[Ledger, bytes]]
    nbytes: int


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

    def of(self, track: Track, slots: bytes) -> list[memoryview]:
        """The memory of some slots, in their order."""
        rows = self._rows[track.index]
        return [rows[slot].data for slot in memoryview(slots).cast("i")]
