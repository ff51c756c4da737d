"""Making room (E1 to E7).

A pool asks for slots. What running requests left behind and nobody has used since goes first, then
the least recently used victim of that component (I9). Inside the tree it takes narrower components
along and leaves wider ones; at a leaf everything goes. Candidates wait in queues per component and
tier, see `kvgraft.tree.recency`.
"""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.slots import SLOT_BYTES
from kvgraft.tree.node import Node
from kvgraft.tree.track import Cause, Track
from kvgraft.tree.tree import Tree

__all__ = [
    "Victim",
    "bury_unreachable",
    "evict_device",
    "evict_host",
    "evict_victim",
    "has_left_behind",
    "next_device_victim",
]


class Victim(NamedTuple):
    """One node's cells chosen to leave DEVICE."""

    node: Node
    track: Track
    tracks: list[Track]
    at_leaf: bool


def has_left_behind(tree: Tree, track: Track) -> bool:
    """Whether the component's next victim is data that a running request left behind."""
    while (node := track.take_behind()) is not None:
        if tree.is_device_candidate(node, track):
            track.queue_device(node)
            return True
    return False


def next_device_victim(tree: Tree, track: Track) -> Victim | None:
    """Take the component's least recently used candidate off its queue; None if there is none."""
    index = track.index
    while (node := track.take_device()) is not None:
        cell = node.cells[index]
        if cell.device is None or cell.device_pins:
            continue
        held = []
        pinned = False
        for other, its in zip(tree.tracks, node.cells):
            if its.device is not None:
                held.append(other)
                pinned = pinned or its.device_pins > 0
        if node.live_device == len(held) and not pinned:
            return Victim(node, track, held, True)
        if track.is_everything:
            continue
        narrower = [other for other in held if other.index in track.narrower]
        if pinned and any(node.cells[other.index].device_pins for other in narrower):
            continue
        return Victim(node, track, narrower, False)
    return None


def evict_victim(tree: Tree, victim: Victim) -> None:
    """Free the victim's DEVICE slots: demoted where HOST has a copy, else deleted (E3, E4)."""
    node = victim.node
    parent = node.parent
    assert parent is not None
    along: Cause = "leaf" if victim.at_leaf else "cascade"
    for track in victim.tracks:
        cell = node.cells[track.index]
        slots = cell.device
        assert slots is not None
        cell.device = None
        n_slots = len(slots) // SLOT_BYTES
        track.device.evictable -= n_slots
        track.device.allocator.free(slots)
        if track is not victim.track:
            track.device_evictions[along] += n_slots
        else:
            track.device_evictions["deleted" if cell.host is None else "demoted"] += n_slots
        if node.points is not None and cell.host is None:
            tree.lose_points(node, track)
    tree.sink_device(node, len(victim.tracks))
    lift_recency(tree, node, parent)
    if node.live_host or node.operations is not None or node.children is not None:
        bury_unreachable(tree, node)
    tree.remove_dead(node)


def lift_recency(tree: Tree, node: Node, parent: Node) -> None:
    """A use of a node is a use of its prefix: the parent, next in line, inherits the stamp.

    Kept lazily: matching touches one node, and the stamp climbs when the nodes below are gone.
    """
    if parent.parent is None:
        return
    leaf = not node.live_device and tree.is_device_leaf(parent)
    for track in tree.everything:
        above = parent.cells[track.index]
        below = node.cells[track.index]
        above.stamp = max(above.stamp, below.stamp)
        if leaf and above.device is not None and not above.device_pins:
            track.queue_device(parent)


def evict_device(tree: Tree, track: Track, n_slots: int) -> int:
    """Free at least `n_slots` more DEVICE slots of one component; returns how many it freed.

    Stops as soon as the target is reached, counting what cascades freed; returns short when there
    is nothing left to take (E2, E6). Nothing is copied: see `kvgraft.room` for write-back.
    """
    before = track.device.free
    target = before + n_slots
    while track.device.free < target:
        victim = next_device_victim(tree, track)
        if victim is None:
            break
        evict_victim(tree, victim)
    return track.device.free - before


def evict_host(tree: Tree, track: Track, n_slots: int) -> int:
    """Free at least `n_slots` more HOST slots of one component; returns how many it freed (E5)."""
    ledger = track.host
    assert ledger is not None
    before = ledger.free
    target = before + n_slots
    while ledger.free < target:
        node = track.take_host()
        if node is None:
            break
        if tree.is_host_candidate(node, track):
            _evict_host_node(tree, node, track)
    return ledger.free - before


def _evict_host_node(tree: Tree, node: Node, track: Track) -> None:
    """Free one node's HOST cells: everything at a leaf, else the component and narrower ones."""
    at_leaf = tree.is_host_leaf(node)
    held = [other for other in tree.tracks if node.cells[other.index].host is not None]
    if not at_leaf or any(not _host_idle(node, other) for other in held):
        # A canonical copy on HOST is of use as long as DEVICE has the wider component's data.
        held = [
            other
            for other in held
            if other.index in track.narrower and (other is track or not other.home_is_host)
        ]
        at_leaf = False
        if any(not _host_idle(node, other) for other in held):
            return
    parent = node.parent
    assert parent is not None
    for other in held:
        if other is not track:
            cause: Cause = "leaf" if at_leaf else "cascade"
        else:
            on_device = node.cells[other.index].device is not None and not other.home_is_host
            cause = "demoted" if on_device else "deleted"
        tree.drop_host(node, other, cause)
        if other.home_is_host:
            _lose_home(tree, node, other)
    if parent.parent is not None:
        for other in tree.everything:
            above = parent.cells[other.index]
            above.stamp = max(above.stamp, node.cells[other.index].stamp)
            if tree.is_host_candidate(parent, other):
                other.queue_host(parent)
    bury_unreachable(tree, node)
    tree.remove_dead(node)


def _host_idle(node: Node, track: Track) -> bool:
    """Whether nothing holds the component's HOST cell."""
    cell = node.cells[track.index]
    return not cell.host_pins and not (track.home_is_host and cell.device_pins)


def _lose_home(tree: Tree, node: Node, track: Track) -> None:
    """The canonical copy is gone: DEVICE data of the component and narrower ones is useless."""
    for index in track.narrower:
        other = tree.tracks[index]
        cell = node.cells[index]
        if cell.device is not None and not cell.device_pins:
            cause: Cause = "deleted" if other is track else "cascade"
            tree.drop_device(node, other, cause)


def bury_unreachable(tree: Tree, node: Node) -> None:
    """Drop what cannot be reached any more once prefix-closed data is gone from `node`.

    Nothing below can be resumed from: cells of narrower components on the node, and everything
    under it. Unpinned by T6; the cost is that of the cells dropped.
    """
    if not tree.everything or node.parent is None:
        return
    for track in tree.everything:
        cell = node.cells[track.index]
        on_device = cell.device is not None and not track.home_is_host
        if cell.incoming is None and cell.host is None and not on_device:
            break
    else:
        return
    stack = [node]
    doomed: list[Node] = []
    while stack:
        below = stack.pop()
        doomed.append(below)
        stack.extend(below.each_child())
    for below in reversed(doomed):
        for track in tree.tracks:
            cell = below.cells[track.index]
            if cell.device is not None and not cell.device_pins:
                tree.drop_device(below, track, "cascade")
            if cell.host is not None and not cell.host_pins:
                tree.drop_host(below, track, "cascade")
        if below is not node:
            tree.remove_dead(below)
