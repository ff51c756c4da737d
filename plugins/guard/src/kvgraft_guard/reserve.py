"""Checks of the clean reserve: its entries, their order and their number (B6, E4, T7)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from kvgraft.errors import ContractViolation
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.types import Direction
from kvgraft_guard.order import Order
from kvgraft_guard.tenancy import room_for
from kvgraft_guard.watched import Watched

__all__ = ["Reserve"]

FillPool = Callable[[TreeComponent, int], None]


class Reserve:
    """Watches the clean reserves of one cache."""

    def __init__(self, watched: Watched) -> None:
        cache = watched.cache
        self.watched = watched
        self.tree = cache.tree
        self.reserve = cache.clean_reserve
        self.backups = cache.journal.counters[Direction.BACKUP]
        self.order = Order(cache.tree)

    def fill_pool(self, fill_pool: FillPool, component: TreeComponent, n_slots: int) -> None:
        """`CleanReserve.fill_pool`, and a check of its effect."""
        waited_for = self.reserve.waited_for
        if waited_for and all(
            isinstance(pool, Ledger) and needed <= room_for(pool) for pool, needed in waited_for
        ):
            raise ContractViolation(
                "A8",
                component.name,
                f"{n_slots} slots are copied ahead, and pin their data, while a request waits "
                "whose shortage is over",
            )
        first = self.order.next_in_line(component)
        failed = self.backups.failed
        was = len(component.clean)
        self.watched.filled = component
        try:
            fill_pool(component, n_slots)
        finally:
            self.watched.filled = None
        entered = list(islice(component.clean, was, None))
        if not entered:
            return
        self._check_size(component, entered[-1][1])
        stamp, node = entered[0]
        if first is not None and self.order.rank(component, stamp) > first:
            raise ContractViolation(
                "T7",
                component.name,
                f"{node!r} is taken into the clean reserve at rank "
                f"{self.order.rank(component, stamp)}, and the next in line has {first}",
            )
        if self.backups.failed == failed:
            for _, node in entered:
                self._check_copied(component, node)

    def _check_size(self, component: TreeComponent, last: Node) -> None:
        """The reserve is no larger than its share; its last entry may be (B6)."""
        before = component.clean.n_slots - component.n_slots(last)
        share = self.reserve.wanted(component)
        if before >= share:
            raise ContractViolation(
                "B6",
                component.name,
                f"its clean reserve had {before} slots of {component.device.capacity} when "
                f"{last!r} was entered; {share} are its share",
            )

    def _check_copied(self, component: TreeComponent, node: Node) -> None:
        """Where there is room on HOST, and nobody was promised the data, it is copied (E4)."""
        cell = node.cells[component.index]
        gone = cell.device is None or node.parent is None or self.tree.is_cleared(node)
        if gone or cell.is_backed:
            return
        for each in self.tree.components:
            its = node.cells[each.index]
            if its.device is None:
                continue
            if each.host is not None and each.host_floor is not None:
                score, level = each.host.queue.score(its.stamp), self.tree.level(its.stamp)
                less = score is not None and score < each.host_floor
                if level < each.host_level or (level == each.host_level and less):
                    return  # HOST keeps what is worth more
            no_room = each.host is not None and each.host.free < each.n_slots(node)
            path = 1 if each.is_state else node.end * each.slots_per_page
            on_host = each.host if each.home_is_host else None  # pinned there, too
            if no_room or min(each.device.headroom, on_host.headroom if on_host else path) < path:
                return
        raise ContractViolation(
            "E4",
            component.name,
            f"{node!r} is in the clean reserve, has no copy and none on its way, with room on HOST",
        )
