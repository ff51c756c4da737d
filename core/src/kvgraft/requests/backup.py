"""Decides which nodes are backed up, and when (B1, B2, B6, B7)."""

from __future__ import annotations

import logging
from typing import Final

from kvgraft.compiled import mypyc_attr
from kvgraft.config import WritePolicy
from kvgraft.errors import PluginError
from kvgraft.requests.eviction import Evictor
from kvgraft.transfers.journal import Journal
from kvgraft.tree import operations
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.holding import hold_host, let_go_of_host
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction

__all__ = ["Backups"]

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

    def inserted(self, anchor: Node, nodes: list[Node], since: int) -> None:
        """Nodes on the path to `anchor` gained data; the caller holds a receipt over them.

        Nodes that gained it earlier, from page `since` on, were published without a backup.
        """
        if self.enabled and self.policy is WritePolicy.WRITE_THROUGH:
            self._back_up(_with_gaps_above(self.tree, anchor, nodes, since))

    def matched(self, receipt: Receipt) -> None:
        """A match uses the data that `receipt` pins: data left behind is worth a copy now, too."""
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
            if not operations.may_back_up(self.tree, node):
                return
            operation = operations.begin_backup(self.tree, node, components)
            if operation is None and self._make_room(node, components):
                if not operations.may_back_up(self.tree, node):
                    return  # the room came from data above
                operation = operations.begin_backup(self.tree, node, components)
            if operation is None:
                return
            try:
                self.journal.submit(operation, Direction.BACKUP)
            except PluginError as error:
                # The request's call succeeded; the data is as good as never backed up (I8).
                logger.warning("a node stays without a backup: %s", error)
                return

    def _make_room(self, node: Node, components: list[TreeComponent]) -> bool:
        """Make room on HOST for a node, where that was short; whether there is room now.

        Not out of data above it: its copy is of no use without that.
        """
        short = [
            component
            for component in components
            if (ledger := component.hosts[node.tenant]) is not None
            and ledger.room < component.n_slots(node)
        ]
        if not short or any(_never_fits(component, node) for component in components):
            return False
        assert node.parent is not None
        above = hold_host(self.tree, node.parent)
        if above is None:
            return False
        try:
            return all(
                self.evictor.free_host(component, component.n_slots(node), node.tenant)
                for component in short
            )
        finally:
            let_go_of_host(self.tree, above)


def _never_fits(component: TreeComponent, node: Node) -> bool:
    """Whether HOST has no room for a node, whatever is evicted."""
    ledger = component.hosts[node.tenant]
    return ledger is None or ledger.headroom < component.n_slots(node)


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
