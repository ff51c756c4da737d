"""Clearing namespaces, and the sweeper that frees their data (E2).

A cleared namespace begins again with an empty tree. Its old nodes stay below their old root and in
the books, but no match finds them. A `Sweeper` frees them in small steps, so that no call waits for
a large tree; requests that need room take it from them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from kvgraft.cache import Cache
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.keys import expect_namespace
from kvgraft.tree.ledger import PoolBooks
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Namespaces, Tier
from kvgraft_retention.stats import ClearStats

__all__ = ["SLICE", "Sweeper", "clear"]


def clear(cache: Cache, namespace: object, version: object = None) -> ClearStats:
    """Forget all data of one namespace, or of all, see `Cache.clear`."""
    tree = cache.tree
    if namespace is Namespaces.ALL:
        namespaces = list(tree.roots)
    else:
        expect_namespace(namespace)
        namespaces = [namespace] if namespace in tree.roots else []
    durable = True
    if cache.storage:
        cleared = None if namespace is Namespaces.ALL else [namespace]
        durable = cache.storage.cleared(cleared, version)
    pools = [(component, component.device, component.host) for component in tree.components]
    was = [(device.free, 0 if host is None else host.free) for _, device, host in pools]
    roots = tree.detach_roots(namespaces)
    gone = set(roots)
    n_pins = cache.pins.cleared(set(namespaces)) if cache.pins else 0
    kept, complete = cache.evictor.sweeper.begin(roots)
    held = held_slots(tree, kept)
    freed = list(zip(pools, was))
    return ClearStats(
        len(roots),
        {each.name: device.free - before for (each, device, _), (before, _) in freed},
        {
            each.name: 0 if host is None else host.free - before
            for (each, _, host), (_, before) in freed
        },
        *held,
        sum(each.root in gone for each in cache.requests.values()),
        n_pins,
        complete,
        durable,
    )


SLICE: Final = 64
"""Most steps of one call, each of about 5 µs; a node takes two."""

SLICE_SLOTS: Final = SLICE // 2
"""Slots that this many steps free at least, if no data is held and each node has some."""

LEAST_SLICES: Final = 8
"""Least slices of a request that needs room, since few nodes have a state or pages of a window."""


class _Visit:
    """A node on the way from a root to where the sweeper is.

    Attributes:
        node: the node.
        parts: its children in the node's own dictionaries, those not begun; None before the first.
        below: children of the last part, not visited so far.
        busy: whether a transfer is under way below it.
    """

    __slots__ = ("below", "busy", "node", "parts")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.parts: list[Iterable[Node]] | None = None
        self.below: list[Node] = []
        self.busy = False

    def next(self) -> Node | None:
        """A child that was not visited; None if there is none. Lists no more than one part."""
        if self.parts is None:
            children = self.node.children
            if isinstance(children, list):
                self.parts = [each.values() for each in children]
            else:
                self.parts = [self.node.each_child()]
        while not self.below and self.parts:
            self.below = list(self.parts.pop())
        return self.below.pop() if self.below else None


class Sweeper:
    """Drops cleared data that nobody holds.

    It visits children before their parents, some steps in each call, and goes on where it stopped.
    Data above a transfer's waits for the transfer's end, too, because arriving data needs it (T5).

    Args:
        tree: the tree.

    Attributes:
        n_steps: most steps of one call.
        is_behind: whether there is cleared data that it has not visited yet.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.n_steps = SLICE
        self.is_behind = False
        self._path: list[_Visit] = []

    def begin(self, roots: Sequence[Node]) -> tuple[list[Node], bool]:
        """Begin with trees that have just been cleared; then go on with those before.

        Returns:
            Visited nodes with held data, and whether all nodes were visited.
        """
        left, cleared, new = self.n_steps, self.tree.cleared, set(roots)
        self._path = self._path or [_Visit(root) for root in cleared if root not in new]
        outer = len(self._path)
        self._path += [_Visit(root) for root in roots if root in cleared]
        visited = []
        while left and len(self._path) > outer:
            visited.append(self._step())
            left -= 1
        done = len(self._path) == outer
        self.is_behind = self.is_behind or not done
        while left and self._path:
            self._step()
            left -= 1
        return [node for node in visited if node is not None and node.parent is not None], done

    def resume(self) -> None:
        """Take some steps; once all nodes are visited, visit those with held data again."""
        if not self._path:
            self._path = [_Visit(root) for root in self.tree.cleared]
        for _ in range(self.n_steps):
            if not self._path:
                break
            self._step()

    def finish(self) -> None:
        """Drop all data that nobody holds; O(nodes of cleared trees)."""
        self._path = [_Visit(root) for root in self.tree.cleared]
        while self._path:
            self._step()
        self.is_behind = False

    def ensure_free(self, ledger: PoolBooks, n_slots: int) -> None:
        """Take steps through data not visited yet, until a ledger has room for `n_slots`.

        At most the steps that suffice if each node has one free slot, but at least some slices.
        """
        n_slices = max(LEAST_SLICES, -(-(n_slots - ledger.room) // SLICE_SLOTS))
        asked, self.tree.for_tenant = self.tree.for_tenant, None
        try:
            for _ in range(self.n_steps * n_slices):
                if not self.is_behind or ledger.room >= n_slots:
                    break
                self._step()
        finally:
            self.tree.for_tenant = asked

    def _step(self) -> Node | None:
        """Go one node down, or leave one whose children are done; the node that was left."""
        visit = self._path[-1]
        node = visit.node
        child = visit.next()
        if child is not None:
            self._path.append(_Visit(child))
            return None
        self._path.pop()
        if node.parent is not None:
            if visit.busy or node.operations is not None:
                self._path[-1].busy = True
            else:
                _drop(self.tree, node)
        if not self._path:
            self.is_behind = False
        return node


def _drop(tree: Tree, node: Node) -> None:
    """Drop the data of one node that is nobody's, a canonical copy after what depends on it."""
    for tier in (Tier.DEVICE, Tier.HOST):
        for component in tree.components:
            if tree.is_candidate(node, component, tier):
                tree.drop(node, component, tier, "cleared")
    tree.prune(node)


def held_slots(tree: Tree, nodes: Iterable[Node]) -> tuple[dict[str, int], dict[str, int]]:
    """Slots on DEVICE and on HOST of some nodes, by component."""
    device = dict.fromkeys(tree.by_name, 0)
    host = dict.fromkeys(tree.by_name, 0)
    for node in nodes:
        for component, cell in zip(tree.components, node.cells):
            device[component.name] += len(cell.device or b"") // SLOT_BYTES
            host[component.name] += len(cell.host or b"") // SLOT_BYTES
    return device, host
