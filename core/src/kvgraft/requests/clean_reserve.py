"""The clean reserve: the end of the eviction order is copied to HOST ahead (E4, B6)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from kvgraft.compiled import mypyc_attr
from kvgraft.config import WritePolicy
from kvgraft.errors import PluginError
from kvgraft.requests.eviction import Evictor
from kvgraft.transfers.journal import Journal
from kvgraft.tree import eviction, operations
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.eviction import Victim
from kvgraft.tree.ledger import PoolBooks
from kvgraft.tree.lifetimes import EXPIRED
from kvgraft.tree.node import CLEAN, ON_DEVICE, Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction

__all__ = ["RESERVE_SHARE", "CleanReserve"]

logger = logging.getLogger("kvgraft")

RESERVE_SHARE: Final = 16
"""The usual share: more is copied in vain, less is used up between two steps."""

STEPS: Final = 4
"""Steps in which an empty reserve is filled: this bounds the copies that one step begins."""


class _Next(NamedTuple):
    """A victim.

    Attributes:
        stamp: with which it leaves.
        victim: the data.
    """

    stamp: int
    victim: Victim


@mypyc_attr(allow_interpreted_subclasses=True)
class CleanReserve:
    """Under write-back, begins the copies of the next victims of every pool with a HOST mirror.

    So eviction finds data that HOST has, and waits for no copy. Decides by the books and the
    eviction order alone (D1). There is none where tenants share the pools: which data is next
    depends on the tenant that asks.

    Attributes:
        share: one in so many DEVICE slots of a pool is free, or in its reserve.
        waited_for: pools, with the slots that the last request asked of them if they were short.
    """

    def __init__(self, tree: Tree, journal: Journal, evictor: Evictor, policy: WritePolicy) -> None:
        self.tree = tree
        self.journal = journal
        self.evictor = evictor
        self.share = RESERVE_SHARE
        self.waited_for: Sequence[tuple[PoolBooks, int]] = ()
        self.components = [
            component
            for component in tree.mirrored
            if policy is WritePolicy.WRITE_BACK and not component.withholds
        ]

    def wanted(self, component: TreeComponent) -> int:
        """DEVICE slots of a component that are to be free, or in its reserve."""
        return -(-component.device.capacity // self.share)

    def fill(self) -> None:
        """Take the next victims into the reserve of each pool that lacks some. Never waits.

        Copies pin their data and what is above it. They wait while a deferred request would fit:
        the next call admits it, so it waits for those in flight alone (A8).
        """
        waited_for = self.waited_for
        if waited_for and all(needed <= pool.headroom for pool, needed in waited_for):
            return
        if self.journal.hangs(Direction.BACKUP):
            return
        for component in self.components:
            wanted = self.wanted(component)
            lacking = wanted - component.device.free - component.clean.n_slots
            if lacking > 0:
                self.fill_pool(component, min(lacking, -(-wanted // STEPS)))

    def fill_pool(self, component: TreeComponent, n_slots: int) -> None:
        """Take victims of at least `n_slots` slots into the reserve, and begin their copies."""
        goal = component.clean.n_slots + n_slots
        entry = self._first(component)
        while entry is not None and self._copy_run(component, entry, goal):
            entry = self._take(component) if component.clean.n_slots < goal else None

    def _first(self, component: TreeComponent) -> _Next | None:
        """The next victim: what is above the reserve, unless other data is to leave before by now.

        That may be data that was held until now, or of a lower priority or score.
        """
        above, other = self._above(component, component.clean.last), self._take(component)
        if above is None or other is None:
            return above or other
        if self._rank(component, other) < self._rank(component, above):
            return other
        component.queue_device(other.victim.node)
        return above

    def _take(self, component: TreeComponent) -> _Next | None:
        """The next victim as the policy orders them, taken off its queue; None if there is none."""
        while (node := component.take_in_order()) is not None:
            victim = eviction.victim_at(self.tree, node, component)
            if victim is not None:
                return _Next(node.cells[component.index].stamp, victim)
        return None

    def _rank(self, component: TreeComponent, entry: _Next) -> tuple[float, float, int]:
        """The lowest leaves first."""
        level = self.tree.level(entry.stamp)
        score = None if level == EXPIRED else component.device_queue.score(entry.stamp)
        return level, 0.0 if score is None else score, entry.stamp

    def _copy_run(self, component: TreeComponent, entry: _Next | None, goal: int) -> bool:
        """Enter a victim in the reserve, and those above that leave right behind it.

        Their copies begin when all are known: a copy pins its data. False if a hook failed.
        """
        run: list[Victim] = []
        while entry is not None and component.clean.n_slots < goal:
            stamp, victim = entry
            component.keep_clean(victim.node, stamp)
            run.append(victim)
            entry = self._above(component, (stamp, victim.node))
        return all(self._copy(victim) for victim in run)

    def _above(self, component: TreeComponent, below: tuple[int, Node] | None) -> _Next | None:
        """The victim above an entry of the reserve, where it leaves right behind that.

        A node that is a leaf once the one below has left inherits its place in the order, unless it
        was used later itself, or has a place of its own there.
        """
        if below is None or not component.is_prefix_closed:
            return None
        stamp, node = below
        above = node.parent
        if above is None or above.parent is None:
            return None
        cell = above.cells[component.index]
        if cell.stamp > stamp or cell.queued & (ON_DEVICE | CLEAN):
            return None
        victim = eviction.victim_at(self.tree, above, component, below=1)
        return None if victim is None else _Next(stamp, victim)

    def _copy(self, victim: Victim) -> bool:
        """Begin the copy of data that HOST lacks; False if a component's hook failed."""
        tree, node = self.tree, victim.node
        unbacked = [
            each for each in operations.needs_backup(tree, node) if each in victim.components
        ]
        if (
            not all(eviction.is_admitted(self.tree, victim, each) for each in unbacked)
            or not unbacked
        ):
            return True
        if not all(
            self.evictor.free_host(each, each.n_slots(node), node.tenant) for each in unbacked
        ):
            return True
        if not eviction.still_there(victim):
            return True
        operation = operations.begin_backup(tree, node, unbacked)
        if operation is None:
            return True
        try:
            self.journal.submit(operation, Direction.BACKUP)
        except PluginError as error:
            logger.warning("a node stays without a backup: %s", error)
            return False
        return True
