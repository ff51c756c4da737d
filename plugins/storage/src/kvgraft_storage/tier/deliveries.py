"""Keeps fetched data on HOST until its queued requests begin, for a bounded time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING, NamedTuple

from kvgraft.tree import matching
from kvgraft.tree.pinning import Receipt, hold_host, release
from kvgraft.tree.tree import Tree

if TYPE_CHECKING:
    from kvgraft_storage.tier.prefetching import Prefetch

__all__ = ["Deliveries", "Delivery"]


class Delivery(NamedTuple):
    """The pins of one prefetch's data up to a boundary, and when they expire."""

    prefetch: Prefetch
    boundary: int
    receipt: Receipt
    until: float


class Deliveries:
    """Pins on HOST of data that prefetches delivered, in order of arrival of the prefetches.

    They are released when the request begins or is given up, when `timeout_s` is over, and when an
    older prefetch or a request's admission needs the room.

    Args:
        tree: the tree.
        clock: monotonic, in seconds.
        timeout_s: longest time for which data is kept for its request.
    """

    def __init__(self, tree: Tree, clock: Callable[[], float], timeout_s: float) -> None:
        self.tree = tree
        self.timeout_s = timeout_s
        self._clock = clock
        self._kept: dict[Prefetch, Delivery] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, prefetch: Prefetch) -> bool:
        return prefetch in self._kept

    def keep(self, prefetch: Prefetch, boundary: int) -> None:
        """Pin the data that a request needs on HOST at a boundary, in pages, and nothing more.

        Nothing is pinned if that takes slots promised to admitted requests (A12).
        """
        before, tree = self._kept.pop(prefetch, None), self.tree
        root = tree.hold_root(prefetch.key.namespace)
        found = matching.match(tree, prefetch.key, boundary)
        if found.anchor:
            receipt = hold_host(tree, matching.anchor_node(tree, found), found.anchor)
            if receipt is not None:
                until = self._clock() + self.timeout_s
                self._kept[prefetch] = Delivery(prefetch, boundary, receipt, until)
        if before is not None:
            release(tree, before.receipt)
        tree.release_root(root)

    def release(self, prefetch: Prefetch) -> None:
        """Release a prefetch's pins, if it has any: its data is evicted like any other."""
        delivery = self._kept.pop(prefetch, None)
        if delivery is not None:
            release(self.tree, delivery.receipt)

    def let_go_of(self, namespaces: Container[object] | None) -> None:
        """Release the pins in some namespaces, or in all."""
        for prefetch in list(self._kept):
            if namespaces is None or prefetch.key.namespace in namespaces:
                self.release(prefetch)

    def expire(self) -> None:
        """Release expired pins."""
        if self._kept:
            now = self._clock()
            for prefetch in [each for each, kept in self._kept.items() if kept.until <= now]:
                self.release(prefetch)

    def give_way(self, arrival: int = 0, tenant: int | None = None) -> Delivery | None:
        """Release the pins of the prefetch that came last: no request waits for one behind it.

        Args:
            arrival: only of prefetches after this number.
            tenant: only of this tenant's; None for any.

        Returns:
            The pins, for `take_back`; None if there are none.
        """
        tenant_of = self.tree.tenant_of
        after = [
            each
            for each in self._kept
            if each.arrival > arrival and tenant in (None, tenant_of(each.key.namespace))
        ]
        if not after:
            return None
        delivery = self._kept[max(after, key=lambda each: each.arrival)]
        self.release(delivery.prefetch)
        return delivery

    def take_back(self, given: Iterable[Delivery]) -> None:
        """Pin again data that just gave way in vain."""
        for prefetch, boundary, _, until in given:
            self.keep(prefetch, boundary)
            if prefetch in self._kept:
                self._kept[prefetch] = self._kept[prefetch]._replace(until=until)

    def receipts(self) -> list[Receipt]:
        """The pins, for integrity checks."""
        return [kept.receipt for kept in self._kept.values()]
