"""Every ledger and eviction counter of a cache, read at once.

A check compares two readings, so its cost depends on the number of pools and not on the tree's
content.
"""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.cache import Cache
from kvgraft.tree.component import CAUSES, TreeComponent
from kvgraft.tree.ledger import PoolBooks

__all__ = [
    "CLEARED",
    "EVICTABLE",
    "FREE",
    "IN_FLIGHT",
    "PINNED",
    "PRIVATE",
    "PROMISED",
    "Books",
    "Counts",
    "Left",
    "Pool",
    "Reading",
]

Counts = tuple[int, int, int, int, int, int]
"""A ledger's terms: free, evictable, pinned, private, in flight, and the slots promised of them.

Slots in use that will move to another pool keep a free one each, which does not count as free.
"""

FREE, EVICTABLE, PINNED, PRIVATE, IN_FLIGHT, PROMISED = range(6)

Left = tuple[int, ...]
"""Slots that left a pool so far, by cause in the order of `kvgraft.tree.component.CAUSES`."""

CLEARED = CAUSES.index("cleared")


class Pool(NamedTuple):
    """One pool and its books.

    Attributes:
        component: whose it is.
        name: `"device"`, `"host"` or the name of a private pool.
        ledger: its books.
        tree_component: the component's constants.
    """

    component: str
    name: str
    ledger: PoolBooks
    tree_component: TreeComponent


class Reading(NamedTuple):
    """The books at one moment, by position in `Books.pools`.

    Attributes:
        counts: of every pool.
        left: slots that left each of the tree's pools, which come first.
    """

    counts: list[Counts]
    left: list[Left]

    def swept(self, now: Reading) -> Reading:
        """These books as if the cleared data that left until `now` had left before them.

        Any operation that makes room may free it, on both tiers.
        """
        counts, left = list(self.counts), list(self.left)
        for at, (then, later) in enumerate(zip(self.left, now.left)):
            n_slots = later[CLEARED] - then[CLEARED]
            if n_slots:
                free, evictable, pinned, private, flight, promised = counts[at]
                free, evictable = free + n_slots, evictable - n_slots
                counts[at] = (free, evictable, pinned, private, flight, promised)
                left[at] = (*then[:CLEARED], later[CLEARED], *then[CLEARED + 1 :])
        return Reading(counts, left) if left != self.left else self


class Books:
    """The pools of one cache: DEVICE by component, HOST by component, private ones.

    Attributes:
        pools: all of them.
        n_device: how many DEVICE pools there are; pool `i` is that of the tree's component `i`.
        n_tree: how many pools the tree holds data in.
        host: position of the HOST pool by the component's index, where it has one.
    """

    def __init__(self, cache: Cache) -> None:
        components = cache.tree.components
        pools = [
            Pool(component.name, "device", component.device, component) for component in components
        ]
        self.n_device = len(pools)
        self.host: dict[int, int] = {}
        for component in components:
            if component.host is not None:
                self.host[component.index] = len(pools)
                pools.append(Pool(component.name, "host", component.host, component))
        self.n_tree = len(pools)
        for component, each, ledgers in zip(components, cache.mounted, cache.private):
            for pool, ledger in zip(each.component.private, ledgers):
                pools.append(Pool(component.name, pool.name, ledger, component))
        self.pools = tuple(pools)
        self._ledgers = [(pool.ledger, pool.ledger.allocator) for pool in pools]
        self._evictions = [component.device.evicted for component in components]
        self._evictions += [
            component.host.evicted for component in components if component.host is not None
        ]

    def read(self) -> Reading:
        """The books now; O(pools)."""
        return Reading(self._counts(), [tuple(causes.values()) for causes in self._evictions])

    def read_after(self, was: Reading, *, left: bool) -> Reading:
        """The books after an operation; `was` itself if it changed none of them.

        Args:
            was: the books before it.
            left: whether data left the tree in it; if not, nothing was counted as evicted.
        """
        counts = self._counts()
        if not left:
            return was if counts == was.counts else Reading(counts, was.left)
        return Reading(counts, [tuple(causes.values()) for causes in self._evictions])

    def _counts(self) -> list[Counts]:
        return [
            (
                allocator.n_free - allocator.closing,
                ledger.evictable,
                ledger.pinned,
                ledger.private,
                ledger.in_flight,
                ledger.promised,
            )
            for ledger, allocator in self._ledgers
        ]

    def private_of(self, component: TreeComponent) -> list[int]:
        """Positions of a component's private pools, in their order."""
        return [
            at
            for at in range(self.n_tree, len(self.pools))
            if self.pools[at].tree_component.index == component.index
        ]
