"""Copies to HOST: which nodes are backed up and when, and the clean reserve (B1, B2, B6, B7, E4).

Under write-back the next victims are copied ahead, so that making room waits for no copy.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from kvgraft.compiled import mypyc_attr
from kvgraft.config import WritePolicy
from kvgraft.errors import PluginError
from kvgraft.requests.eviction import Evictor
from kvgraft.transfers.journal import Journal
from kvgraft.tree import eviction, operations
from kvgraft.tree.component import EXPIRED, TreeComponent
from kvgraft.tree.eviction import Victim
from kvgraft.tree.ledger import HOST, PoolBooks
from kvgraft.tree.node import CLEAN, Node
from kvgraft.tree.pinning import Receipt, hold_host, release
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction

logger = logging.getLogger("kvgraft")

SELECTIVE_TOUCHES: Final = 1
"""Hits after which write-through-selective backs a prefix up: the insert is the first touch."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Backups:
    """Starts backups for nodes that a receipt holds, root first."""

    def __init__(self, tree: Tree, journal: Journal, evictor: Evictor, policy: WritePolicy) -> None:
        self.tree = tree
        self.journal = journal
        self.evictor = evictor
        self.policy = policy
        self.enabled = bool(tree.mirrored)
        self.at_insert = self.enabled and policy is WritePolicy.WRITE_THROUGH

    def inserted(self, anchor: Node, nodes: list[Node], since: int) -> None:
        """Nodes on the path to `anchor` gained data; the caller holds a receipt over them.

        Nodes that gained it earlier, from page `since` on, were published without a backup.
        """
        if self.at_insert:
            self._back_up(_with_gaps_above(self.tree, anchor, nodes, since))

    def matched(self, receipt: Receipt) -> None:
        """A match uses the data that `receipt` pins: evict-first data is worth a copy now, too."""
        if not self.enabled or self.policy is WritePolicy.WRITE_BACK:
            return
        anchor, components = receipt.anchor, self.tree.components
        if self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE and anchor.hits < SELECTIVE_TOUCHES:
            return
        bounded = [component for component in components if not component.is_prefix_closed]
        reached = {
            id(node): node
            for component in bounded
            for node in operations.segment_nodes(component, receipt)
            if operations.needs_backup(self.tree, node)
        }
        if reached or self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            nodes = sorted(reached.values(), key=lambda each: each.end)
            self._back_up(_with_gaps_above(self.tree, anchor, nodes, anchor.end))

    def _back_up(self, nodes: list[Node]) -> None:
        """Back nodes up, root first; the first that finds no room ends the chain (B1)."""
        for node in nodes:
            components = operations.needs_backup(self.tree, node)
            if not components:
                continue
            if not operations.parent_on_host(self.tree, node, or_coming=True):
                return
            operation = operations.begin_backup(self.tree, node, components)
            if operation is None and self._ensure_free(node, components):
                if not operations.parent_on_host(self.tree, node, or_coming=True):
                    return  # room was made by evicting the parent's copy
                operation = operations.begin_backup(self.tree, node, components)
            if operation is None:
                return
            try:
                self.journal.submit(operation, Direction.BACKUP)
            except PluginError as error:
                # The request's call succeeded; the data simply has no backup (I8).
                logger.warning("a node stays without a backup: %s", error)
                return

    def _ensure_free(self, node: Node, components: list[TreeComponent]) -> bool:
        """Make room on HOST for a node, where that was short; whether there is room now.

        Not out of data above it: its copy is of no use without that.
        """
        pools = [(each, each.ledger(HOST, node.tenant), each.n_slots(node)) for each in components]
        short = [(each, n_slots) for each, ledger, n_slots in pools if ledger.room < n_slots]
        if not short or any(ledger.headroom < n_slots for _, ledger, n_slots in pools):
            return False
        assert node.parent is not None
        above = hold_host(self.tree, node.parent)
        if above is None:
            return False
        try:
            return all(self.evictor.ensure_free(each, HOST, n, node.tenant) for each, n in short)
        finally:
            release(self.tree, above)


def _with_gaps_above(tree: Tree, anchor: Node, nodes: list[Node], since: int) -> list[Node]:
    """`nodes`, and nodes on the path to `anchor` without a backup, root first.

    Climbs above the first of `nodes` and page `since`, to a node whose base is on HOST or on its
    way there.
    """
    chain = {id(node): node for node in nodes}
    first = min([since, *(node.start for node in nodes)])
    node: Node | None = anchor
    while node is not None and node.parent is not None:
        if node.end <= first and not operations.needs_backup(tree, node):
            base = node.cells[0]
            if (
                tree.components[0].host is None
                or base.host is not None
                or base.incoming is not None
            ):
                break
        chain[id(node)] = node
        node = node.parent
    return sorted(chain.values(), key=lambda each: each.end)


RESERVE_SHARE: Final = 16
"""The usual share: a larger one makes useless copies, a smaller one runs out between steps."""

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
    eviction order alone (D1). Where tenants share the pools there is none: the next victim depends
    on the requesting tenant.

    Attributes:
        share: one in this many DEVICE slots of a pool is free, or in its reserve.
        waited_for: short pools, with the slots that the last request needed of them.
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
            if policy is WritePolicy.WRITE_BACK and not component.per_tenant_order
        ]

    def wanted(self, component: TreeComponent) -> int:
        """DEVICE slots of a component that should be free, or in its reserve."""
        return -(-component.device.capacity // self.share)

    def fill(self) -> None:
        """Take the next victims into the reserve of each pool that lacks some. Never waits.

        Copies pin their data and what is above it. They wait while a deferred request would fit:
        the next call admits it, so it waits for those in flight alone (A8).
        """
        waited_for = self.waited_for
        if waited_for and all(needed <= pool.headroom for pool, needed in waited_for):
            return
        if self.journal.is_stalled(Direction.BACKUP):
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
        """The next victim: the one above the reserve, unless other data must be evicted first.

        That may be data that was pinned until now, or data of a lower priority or score.
        """
        above, other = self._above(component, component.clean.last), self._take(component)
        if above is None or other is None:
            return above or other
        if self._rank(component, other) < self._rank(component, above):
            return other
        component.device.queue.push(other.victim.node)
        return above

    def _take(self, component: TreeComponent) -> _Next | None:
        """The next victim as the policy orders them, taken off its queue; None if there is none."""
        in_order = partial(component.device.queue.take, EXPIRED)  # without evict-first data
        victim = eviction.next_victim(self.tree, component, in_order)
        return None if victim is None else _Next(victim.node.cells[component.index].stamp, victim)

    def _rank(self, component: TreeComponent, entry: _Next) -> tuple[float, float, int]:
        """The lowest leaves first."""
        level = self.tree.level(entry.stamp)
        score = None if level == EXPIRED else component.device.queue.score(entry.stamp)
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
        was used later itself.
        """
        if below is None or not component.is_prefix_closed:
            return None
        stamp, above = below[0], below[1].parent
        if above is None or above.parent is None:
            return None
        cell = above.cells[component.index]
        if cell.stamp > stamp or cell.queued & CLEAN:
            return None
        victim = eviction.victim_at(self.tree, above, component, below=1)
        return None if victim is None else _Next(stamp, victim)

    def _copy(self, victim: Victim) -> bool:
        """Begin the copy of data that HOST lacks; False if a component's hook failed."""
        tree, node = self.tree, victim.node
        unbacked = [
            each for each in operations.needs_backup(tree, node) if each in victim.components
        ]
        if not unbacked or not all(eviction.is_admitted(tree, victim, each) for each in unbacked):
            return True
        if not all(
            self.evictor.ensure_free(each, HOST, each.n_slots(node), node.tenant)
            for each in unbacked
        ) or not eviction.still_there(victim):
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
