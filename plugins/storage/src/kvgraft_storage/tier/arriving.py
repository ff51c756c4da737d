"""Data from STORAGE becomes the tree's, on HOST (S4, S5).

The counterpart of `kvgraft.tree.inserting` for HOST: pages that another transfer brought meanwhile
are kept, and nothing is inserted below a gap (B1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree import matching
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.operations import holds_up, parent_on_host
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_storage.keys import HASH_NBYTES
from kvgraft_storage.tier.names import PageNames, is_named, take_names

__all__ = ["Arrival", "arrive"]

NODES_AT_ONCE: Final = 64
"""Most nodes of one call, however short they are."""


class Arrival(NamedTuple):
    """Pages of one sequence that arrived on HOST.

    Attributes:
        key: the sequence, with a trail to where it is in the tree.
        hashes: the hashes of its pages from page `first` on, 32 bytes each.
        first: the first page of everything but `key`.
        there: per component, bool `[n_pages]`, which pages arrived; a state stands for the last
            page before its boundary. Pages that are adopted are taken out; the others' slots stay
            the caller's.
        slots: per component, int32 `[n_pages, slots_per_page]`, the HOST slots of those pages.
        store: number of the store they are from.
    """

    key: TokenKey
    hashes: bytes | bytearray
    first: int
    there: Sequence[npt.NDArray[np.bool_]]
    slots: Sequence[npt.NDArray[np.int32]]
    store: int


def arrive(tree: Tree, start: Node, end: int, arrival: Arrival, n_pages: int) -> Node:
    """Insert the next piece of the arrived data, up to page `end`, below a node.

    Adopted slots move from in flight to the tree's, and can be evicted like all others. A node
    takes a component's data only if all of it came. Existing nodes are filled whole: they are not
    split at the end of the piece.

    Args:
        tree: the tree.
        start: a root or a node backed on HOST (S1).
        end: the end of all data to insert.
        arrival: the data that arrived.
        n_pages: about how many pages to insert now, and the most of a new node.

    Returns:
        The last node of the piece, at page `end` or before it. New nodes may stay without data that
        could not be inserted: the caller pins the last node, or removes nodes without data (T3).
    """
    page_bytes = tree.page_bytes
    tokens = arrival.key.data
    known = matching.follow_key(tree, arrival.key, end).end
    stop = min(end, start.end + n_pages)
    tree.use_class, tree.use_retention = 0, None  # nobody has used it yet
    tree.tick()
    node = start
    for _ in range(NODES_AT_ONCE):
        if node.end >= stop:
            break
        offset = node.end * page_bytes
        child = node.child(bytes(tokens[offset : offset + page_bytes]))
        if child is None:
            child = _grow(tree, node, stop, arrival)
        else:
            covered = _coverage_end(tree, arrival, child.start, min(child.end, known))
            if covered < child.end:
                child = tree.split(child, covered)
        if not is_named(child):
            first, last = child.start - arrival.first, child.end - arrival.first
            take_names(child, arrival.hashes[first * HASH_NBYTES : last * HASH_NBYTES])
        taken = sum([_adopt(tree, child, component, arrival) for component in tree.components])
        if taken:
            _note_stored(tree, child, arrival)
            tree.queue_candidates(child)
        node = child
    return node


def _grow(tree: Tree, parent: Node, end: int, arrival: Arrival) -> Node:
    """A new node below `parent`, as far as coverage is uniform."""
    start = parent.end
    end = _coverage_end(tree, arrival, start, end)
    with memoryview(arrival.key.data) as tokens:
        edge = bytes(tokens[start * tree.page_bytes : end * tree.page_bytes])
    node = tree.grow(edge, parent, start, end)
    for cell in node.cells:
        cell.stamp = tree.clock
    return node


def _coverage_end(tree: Tree, arrival: Arrival, start: int, end: int) -> int:
    """The first page behind `start` at which the arrived data begins or ends; at most `end`."""
    for component in tree.components:
        there = arrival.there[component.index][start - arrival.first : end - arrival.first]
        changes = there if component.is_state else there != there[0]
        if changes.any():
            end = start + int(changes.argmax()) + component.is_state
    return end


def _adopt(tree: Tree, node: Node, component: TreeComponent, arrival: Arrival) -> int:
    """Give `node` one component's arrived data, where it has none on HOST; slots taken."""
    cell = node.cells[component.index]
    ledger = component.hosts[node.tenant]
    if ledger is None or cell.host is not None:
        return 0
    if cell.device is None and cell.incoming is not None:
        return 0  # evicted just now: its copy to HOST holds the cell, and brings the same data
    start = node.end - 1 if component.is_state else node.start
    first, last = start - arrival.first, node.end - arrival.first
    there = arrival.there[component.index]
    if not there[first:last].all() or not _may_hang(tree, node, component):
        return 0
    slots = arrival.slots[component.index][first:last].tobytes()
    there[first:last] = False
    n_slots = len(slots) // SLOT_BYTES
    ledger.in_flight -= n_slots
    component.restamp(node, tree.clock)
    tree.put(node, component, Tier.HOST, slots, Tier.STORAGE)
    return n_slots


def _may_hang(tree: Tree, node: Node, component: TreeComponent) -> bool:
    """Whether the component's data may be on HOST here (B1, T4, T5)."""
    above = node.parent
    assert above is not None
    if (
        component.home_is_host
        and component.is_prefix_closed
        and above.parent is not None
        and above.cells[component.index].host is None
    ):
        return False
    return parent_on_host(tree, node) and holds_up(tree, node, component, to_host=True)


def _note_stored(tree: Tree, node: Node, arrival: Arrival) -> None:
    """Mark data that came from a store as stored."""
    if node.names is None:
        node.names = PageNames(bytearray())
    names = node.names
    if names.store != arrival.store:
        names.store, names.stored = arrival.store, 0
    for component, cell in zip(tree.components, node.cells):
        if cell.host is not None and cell.stamp == tree.clock:
            names.stored |= 1 << component.index
