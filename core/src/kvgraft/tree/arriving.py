"""Data from STORAGE becomes the tree's, on HOST (S4, S5).

The counterpart of `kvgraft.tree.inserting` for the other tier: pages another transfer brought in
the meantime are kept, and nothing is hung below a gap (B1).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvgraft.slots import SLOT_BYTES
from kvgraft.tree.keys import common_prefix_pages
from kvgraft.tree.node import Node, PageNames
from kvgraft.tree.operations import holds_up, parent_on_host
from kvgraft.tree.track import Track
from kvgraft.tree.tree import Tree

__all__ = ["Arrival", "arrive"]


class Arrival(NamedTuple):
    """Pages of one sequence that arrived on HOST.

    Attributes:
        tokens: int32 bytes of the sequence from its start; up to its end they are published.
        hashes: the hashes of its pages from page `first` on.
        first: see `hashes`.
        slots: per component, the HOST slots of each page that arrived, int32 bytes; a state is
            under the last page before its boundary. Slots that are adopted are taken out; so many
            stay the caller's.
        store: number of the store they are from.
    """

    tokens: bytes
    hashes: list[bytes]
    first: int
    slots: list[dict[int, bytes]]
    store: int


def arrive(tree: Tree, start: Node, arrival: Arrival) -> None:
    """Hang what arrived below `start`, a root or a node backed on HOST (S1).

    Adopted slots move from in flight to the tree's, and are victims like all others. A node takes
    a component's data only if all of it came.
    """
    tokens, page_bytes = arrival.tokens, tree.page_bytes
    node = start
    tree.clock += 1
    while (offset := node.end * page_bytes) < len(tokens):
        child = node.child(tokens[offset : offset + page_bytes])
        if child is None:
            child = _grow(tree, node, arrival)
        else:
            agreed = common_prefix_pages(tokens, offset, child.key, page_bytes)
            stop = _coverage_end(tree, arrival, child.start, child.start + agreed)
            if stop < child.end:
                child = tree.split(child, stop)
        taken = sum(_adopt(tree, child, track, arrival) for track in tree.tracks)
        if taken:
            _note_stored(tree, child, arrival)
            tree.queue_candidates(child)
        node = child
    # nodes made for data that then could not be hung lead nowhere (T3)
    tree.remove_dead(node)


def _grow(tree: Tree, parent: Node, arrival: Arrival) -> Node:
    """A new node below `parent`, as far as coverage is uniform."""
    start = parent.end
    end = _coverage_end(tree, arrival, start, len(arrival.tokens) // tree.page_bytes)
    edge = arrival.tokens[start * tree.page_bytes : end * tree.page_bytes]
    node = tree.new_node(edge, parent, start, end)
    tree.link(node)
    for cell in node.cells:
        cell.stamp = tree.clock
    return node


def _coverage_end(tree: Tree, arrival: Arrival, start: int, end: int) -> int:
    """The first page behind `start` at which what arrived begins or ends; at most `end`."""
    for track in tree.tracks:
        slots = arrival.slots[track.index]
        if track.is_state:
            end = min([end, *(page + 1 for page in slots if page + 1 > start)])
            continue
        here = start in slots
        for page in range(start + 1, end):
            if (page in slots) != here:
                end = page
                break
    return end


def _adopt(tree: Tree, node: Node, track: Track, arrival: Arrival) -> int:
    """Give `node` what arrived for one component, where it has nothing on HOST; slots taken."""
    cell = node.cells[track.index]
    ledger = track.host
    pages: Iterable[int] = range(node.start, node.end)
    if track.is_state:
        pages = (node.end - 1,)
    found = arrival.slots[track.index]
    if ledger is None or cell.host is not None:
        return 0  # where a copy from DEVICE is on its way, it finds this there and frees its slots
    if not all(page in found for page in pages) or not _may_hang(tree, node, track):
        return 0
    slots = b"".join([found.pop(page) for page in pages])
    n_slots = len(slots) // SLOT_BYTES
    ledger.in_flight -= n_slots
    cell.stamp = tree.clock
    tree.put_host(node, track, slots)
    return n_slots


def _may_hang(tree: Tree, node: Node, track: Track) -> bool:
    """Whether the component's data may be on HOST here (B1, T4, T5)."""
    above = node.parent
    assert above is not None
    if (
        track.home_is_host
        and track.is_everything
        and above.parent is not None
        and above.cells[track.index].host is None
    ):
        return False
    return parent_on_host(tree, node) and holds_up(tree, node, track, to_host=True)


def _note_stored(tree: Tree, node: Node, arrival: Arrival) -> None:
    """What came from a store need not go there again."""
    if node.names is None:
        pages = slice(node.start - arrival.first, node.end - arrival.first)
        node.names = PageNames(b"".join(arrival.hashes[pages]))
    names = node.names
    if names.store != arrival.store:
        names.store, names.stored = arrival.store, 0
    for track, cell in zip(tree.tracks, node.cells):
        if cell.host is not None and cell.stamp == tree.clock:
            names.stored |= 1 << track.index
