"""HOST slots as memory that a store reads and writes."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.dispatch import Mounted
from kvgraft.tree.track import Track

__all__ = ["Slabs"]


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
