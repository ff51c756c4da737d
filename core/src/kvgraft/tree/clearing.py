"""Clearing: cached data is found no more, at once, and leaves as soon as nobody holds it.

A cleared namespace begins again with an empty tree. The nodes it had stay below their old root as
long as pins or transfers hold data there: they keep their books, and no match leads to them.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree

__all__ = ["held_slots", "sweep"]


def sweep(tree: Tree) -> None:
    """Drop cleared data that nobody holds; O(nodes of cleared trees).

    Data above a transfer's waits for its end, too: what arrives needs it there (T5).
    """
    for root in list(tree.cleared):
        busy: set[Node | None] = set()
        for node in reversed(list(tree.nodes([root]))):  # children before parents
            if node.operations is not None or node in busy:
                busy.add(node.parent)
            else:
                _drop(tree, node)


def _drop(tree: Tree, node: Node) -> None:
    """Drop the data of one node that is nobody's, a canonical copy after what hangs from it."""
    if node.parent is None:
        return  # it went with the node before
    for component in tree.components:
        if tree.is_device_candidate(node, component):
            tree.drop_device(node, component, "cleared")
    for component in tree.components:
        if tree.is_host_candidate(node, component):
            tree.drop_host(node, component, "cleared")
    tree.remove_dead(node)


def held_slots(tree: Tree, roots: Iterable[Node]) -> tuple[dict[str, int], dict[str, int]]:
    """Slots on DEVICE and on HOST below some roots, by component."""
    device = dict.fromkeys(tree.by_name, 0)
    host = dict.fromkeys(tree.by_name, 0)
    for node in tree.nodes(roots):
        for component, cell in zip(tree.components, node.cells):
            device[component.name] += len(cell.device or b"") // SLOT_BYTES
            host[component.name] += len(cell.host or b"") // SLOT_BYTES
    return device, host
