"""Checks of clearing: no match finds the data, held data stays, the rest is freed."""

from __future__ import annotations

from collections.abc import Iterable

from kvgraft.errors import ContractViolation
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.types import Namespaces, Tier
from kvgraft_guard.books import FREE, Reading
from kvgraft_guard.watched import After, Watched
from kvgraft_retention.stats import ClearStats

__all__ = ["Clearing"]


class Clearing:
    """Checks `Cache.clear`."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.tree = watched.tree
        self.books = watched.books

    def clear(self, namespace: object = Namespaces.ALL) -> After:
        """No match finds the old data (M1); held data keeps its pins, the rest is freed."""
        self.watched.rooms.expect(self.watched.nothing, host_too=False)
        pools = self.books.pools[: self.books.n_tree]
        closing = [pool.ledger.allocator.closing for pool in pools]
        nodes = {
            id(node): node
            for name, root in self.tree.roots.items()
            if namespace is Namespaces.ALL or name == namespace
            for node in self.tree.nodes([root])
        }

        def after(result: ClearStats, was: Reading, now: Reading) -> None:
            for pin in self.watched.cache.pins:
                if namespace is Namespaces.ALL or pin.namespace == namespace:
                    raise ContractViolation("K6", None, f"{pin!r} stays, its data was cleared")
            for node in self.tree.nodes(self.tree.roots.values()):
                if id(node) in nodes:
                    raise ContractViolation("M1", None, f"{node!r} was cleared, and may be hit")
            # Data that was cleared before, and has been held until now, waits for a poll.
            left = [each for each in self.tree.nodes(self.tree.cleared) if id(each) in nodes]
            for node in reversed(self._unheld(left) if result.complete else []):
                for component in self.tree.components:
                    self._check_held(node, component)
            for at, pool in enumerate(pools):
                gone = closing[at] - pool.ledger.allocator.closing  # left the pool (K7)
                freed = now.counts[at][FREE] - was.counts[at][FREE] - gone
                said = result.device if pool.name == "device" else result.host
                if said[pool.component] != freed:
                    raise ContractViolation(
                        "E6",
                        pool.component,
                        f"clear says that {said[pool.component]} {pool.name} slots were freed, "
                        f"free rose by {freed}",
                    )

        return after

    def _unheld(self, nodes: Iterable[Node]) -> list[Node]:
        """Those of some nodes that no transfer is on or below."""
        found = {id(node): node for node in nodes}
        for operation in self.watched.operations():
            for node in operation.nodes:
                above: Node | None = node
                while above is not None:
                    found.pop(id(above), None)
                    above = above.parent
        return list(found.values())

    def _check_held(self, node: Node, component: TreeComponent) -> None:
        """Cleared data that nobody needs is gone (T3)."""
        tree = self.tree
        if any(tree.is_candidate(node, component, tier) for tier in Tier):
            raise ContractViolation(
                "T3", component.name, f"{node!r} was cleared, nobody holds it, and it stays"
            )
