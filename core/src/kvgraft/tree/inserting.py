"""Data a request computed becomes the tree's (I1 to I6, I9).

The walk starts on the path that the request's receipt pins, not at the root. Pages another request
inserted in the meantime are kept as they are and the incoming duplicates freed; a tombstone is
revived with the incoming slots, which nobody read before (I4).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple

from kvgraft.policies.policy import LEFT_BEHIND, is_left_behind
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TOKEN_BYTES, TokenKey, common_prefix_pages
from kvgraft.tree.ledger import DEVICE, HOST
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import PointKind

LONGEST_LEAF_BYTES: Final = 4096 * TOKEN_BYTES
"""Key bytes from which on a leaf stops growing, because growing copies it."""

FEW_RUNS: Final = 4
"""Runs up to which a scan is faster than a search."""

first_page: Final = attrgetter("first")

NO_STATES: dict[int, bytes] = {}
"""For a component that keeps none."""

NO_POINTS: Mapping[int, PointKind] = MappingProxyType({})


class Run:
    """Private slots for consecutive pages; it does not change.

    Attributes:
        first, end: pages `[first, end)`.
        device: DEVICE slots, int32 bytes.
        host: HOST slots of the same pages for a component at home there, else None.
        is_left: the request left them behind, and no resume point needs them (I9).
    """

    __slots__ = ("device", "end", "first", "host", "is_left")

    def __init__(
        self,
        first: int,
        end: int,
        device: bytes,
        host: bytes | None = None,
        *,
        is_left: bool = False,
    ) -> None:
        self.first = first
        self.end = end
        self.device = device
        self.host = host
        self.is_left = is_left

    def cut(self, start: int, end: int, *, is_left: bool = False) -> Run:
        """The part inside pages `[start, end)`, both inside the run; evict-first if the run is."""
        host = self.part(self.host, start, end) if self.host else None
        device = self.part(self.device, start, end)
        return Run(start, end, device, host, is_left=is_left or self.is_left)

    def part(self, slots: bytes, start: int, end: int) -> bytes:
        """The part of `slots`, the run's on a tier, for pages `[start, end)` inside the run."""
        first = self.first
        if start == first and end == self.end:
            return slots
        size = len(slots) // (self.end - first)
        return slots[(start - first) * size : (end - first) * size]

    def joined(self, run: Run) -> Run:
        """This run and the one that begins where it ends, as one."""
        host = None if self.host is None or run.host is None else self.host + run.host
        return Run(self.first, run.end, self.device + run.device, host)


class Holding(NamedTuple):
    """Private slots of one component that a request offers to the tree.

    Attributes:
        runs: pages it holds, in order; pages between them were released behind the window (I3).
        states: for a state component, the slot captured at each boundary, in pages; slots that are
            adopted or freed are taken out.
        left: boundaries whose states are left behind: no resume points.
        renews: whether the request is promised as many slots again. Then slots for a pinned node
            are freed: nobody could take them from there, and the promise would not be covered
            (A12).
    """

    runs: list[Run]
    states: dict[int, bytes]
    left: Collection[int] = ()
    renews: bool = False


class Inserted(NamedTuple):
    """Where an insert ended.

    Attributes:
        anchor: the node ending at the inserted boundary.
        nodes: nodes that gained data, root first; the caller enters unpinned ones as candidates,
            see `Tree.queue_candidates`.
        points: the kinds of the resume points that are new.
    """

    anchor: Node
    nodes: list[Node]
    points: list[PointKind]


def insert(
    tree: Tree,
    start: Node,
    key: TokenKey,
    end: int,
    holdings: list[Holding],
    points: Mapping[int, PointKind] = NO_POINTS,
    leaf: Node | None = None,
) -> Inserted:
    """Hand pages `[start.end, end)` of `key` to the tree; each slot is adopted or freed (I1).

    Args:
        tree: the tree.
        start: a node on the path that the request's receipt pins.
        key: at least `end` pages long.
        end: boundary in pages.
        holdings: per component in the tree's order. Runs must end at `end` or before; states
            beyond `end` are left alone.
        points: resume points by boundary, in pages.
        leaf: a node that may grow in place, if the request's receipt alone holds it; its boundary
            moves, and the caller's receipt with it.
    """
    #   key    ──start.end──────────────┬───────────────────────┬───────────────────end
    #   tree      child, merged whole   │ child, cut where the  │ new nodes, cut where
    #             as far as both agree  │ offer begins or ends  │ the offer changes
    # Invariant: every offered slot of pages [start.end, page) was adopted or freed (I1).
    data, page_bytes = key.data, tree.page_bytes
    node, page = start, start.end
    gained: list[Node] = []
    tree.tick()
    while page < end:
        offset = page * page_bytes
        child = node.child(bytes(data[offset : offset + page_bytes]))
        if child is None:
            if node is leaf:
                _lengthen(tree, leaf, key, end, holdings)
            if node.end < end:
                node = _grow(tree, node, key, end, holdings, gained)
            break
        if not data.startswith(child.key, offset) or child.end > end:
            pages = min(common_prefix_pages(data, offset, child.key, page_bytes), end - page)
            if pages < child.end - child.start:
                child = tree.split(child, page + pages)
        child = _split_at_coverage(tree, child, holdings)
        if sum([_adopt(tree, child, *offer) for offer in zip(tree.components, holdings)]):
            gained.append(child)
        node, page = child, child.end
    return Inserted(node, gained, _mark(node, start.end, points) if points else [])


def _mark(node: Node, start: int, points: Mapping[int, PointKind]) -> list[PointKind]:
    """Note the resume points behind page `start` on the path to `node`; the kinds of new ones."""
    new: list[PointKind] = []
    for page in sorted(points, reverse=True) if len(points) > 1 else points:
        if not start < page <= node.end:
            continue
        while node.start >= page:
            assert node.parent is not None
            node = node.parent
        if node.mark_point(page, points[page]):
            new.append(points[page])
    return new


def _between(runs: list[Run], start: int, end: int) -> list[Run]:
    """Those of `runs`, in order, that may have pages in `[start, end)`."""
    low = max(bisect_left(runs, start + 1, key=first_page) - 1, 0)
    return runs[low : bisect_left(runs, end, low, key=first_page)]


def _breakpoints(start: int, end: int, holdings: Iterable[Holding]) -> set[int]:
    """Pages inside `(start, end)` where a component's coverage changes or a state stands."""
    points: set[int] = set()
    for holding in holdings:
        for page in holding.states:
            if start < page < end:
                points.add(page)
        runs = holding.runs
        for run in runs if len(runs) <= FEW_RUNS else _between(runs, start, end):
            if start < run.first < end:
                points.add(run.first)
            if start < run.end < end:
                points.add(run.end)
    return points


def _grow(
    tree: Tree,
    node: Node,
    key: TokenKey,
    end: int,
    holdings: list[Holding],
    gained: list[Node],
) -> Node:
    """Append new nodes below `node` up to page `end`."""
    page_bytes = tree.page_bytes
    start = node.end
    for stop in sorted({*_breakpoints(start, end, holdings), end}):
        edge = bytes(memoryview(key.data)[start * page_bytes : stop * page_bytes])
        node = tree.grow(edge, node, start, stop)
        for component, holding in zip(tree.components, holdings):
            node.cells[component.index].stamp = tree.clock
            _adopt(tree, node, component, holding)
        gained.append(node)
        start = stop
    if key.hashed is not None:
        key.hashed.name(tree, node, key.namespace)
    return node


def _lengthen(tree: Tree, leaf: Node, key: TokenKey, end: int, holdings: list[Holding]) -> None:
    """Add offered pages to a leaf in place, as far as they have the same components' data.

    A node for every few pages would make deep trees. The leaf grows while it is short, only its
    own request holds it, nothing of it was copied, and every component goes on as it does there.
    """
    #   leaf [......end) + [end......stop)     stop: where an offer begins or ends, or has a state
    # Cells with data get the offer's, empty ones stay empty: private -> pinned or evictable.
    start = leaf.end
    if leaf.parent is None or leaf.receipts != 1 or leaf.operations is not None:
        return
    if leaf.children is not None or leaf.names is not None or leaf.live_host:
        return
    if len(leaf.key) >= LONGEST_LEAF_BYTES:
        return
    stop = min(_breakpoints(start, end, holdings), default=end)
    parts: list[tuple[TreeComponent, Run]] = []
    for component, holding in zip(tree.components, holdings):
        cell = leaf.cells[component.index]
        run = next((run for run in holding.runs if run.first <= start < run.end), None)
        alike = (run is None) is (cell.device is None)
        if run is not None and alike:
            alike = run.host is None and run.is_left is is_left_behind(cell.stamp)
            parts.append((component, run.cut(start, stop)))
        if cell.device_pins and not component.is_prefix_closed:
            alike = False
        if not alike or (
            component.is_state and (cell.device is not None or stop in holding.states)
        ):
            return
    leaf.key += bytes(key.data[start * tree.page_bytes : stop * tree.page_bytes])
    leaf.end = stop
    for each in tree.observers:
        each.grew(leaf)
    for component, run in parts:
        cell = leaf.cells[component.index]
        component.devices[leaf.tenant].private -= len(run.device) // SLOT_BYTES
        tree.put(leaf, component, DEVICE, run.device, None, start)
        if not cell.device_pins:
            component.restamp(leaf, tree.clock - LEFT_BEHIND if run.is_left else tree.clock)


def _split_at_coverage(tree: Tree, child: Node, holdings: list[Holding]) -> Node:
    """The first part of `child` on which the adopted data is uniform."""
    adopted = [
        holding
        for component, cell, holding in zip(tree.components, child.cells, holdings)
        if cell.device is None or is_left_behind(cell.stamp) or component.is_state
    ]
    points = _breakpoints(child.start, child.end, adopted)
    return tree.split(child, min(points)) if points else child


def _adopt(tree: Tree, node: Node, component: TreeComponent, holding: Holding) -> bool:
    """Give `node` the holding's slots if its cell is empty, else free them; whether it took any.

    Slots are freed as well where data that they depend on is missing (T4).
    Computing existing data again is a use of it, unless it is left behind again.
    """
    #   cell empty, and data it depends on is there:  private -> evictable, or pinned (L4)
    #   cell full, wider data missing, or only a part of the node:  private -> free
    cells = node.cells
    wanted = cells[component.index].device is None
    for index in component.depends_on:
        wanted = wanted and cells[index].device is not None
    if holding.renews and cells[component.index].device_pins:
        wanted = False
    if component.is_state:
        slots = holding.states.pop(node.end, None)
        if slots is None:
            return False
        is_left = node.end in holding.left
        if not wanted:
            if not is_left:
                tree.touch(node, component)
            component.devices[node.tenant].give_private(slots)
            return False
        _take(tree, node, component, slots, is_left=is_left)
        return True
    runs, first, last = holding.runs, node.start, node.end
    for run in runs if len(runs) <= FEW_RUNS else _between(runs, first, last):
        start = run.first if run.first > first else first
        end = run.end if run.end < last else last
        if start >= end:
            continue
        slots, host = run.device, run.host
        if start != run.first or end != run.end:
            slots = run.part(slots, start, end)
            host = None if host is None else run.part(host, start, end)
        if wanted and start == first and end == last:
            if host is not None:
                _take_host(tree, node, component, host)
            _take(tree, node, component, slots, is_left=run.is_left)
            return True
        if not run.is_left:
            tree.touch(node, component)
        component.devices[node.tenant].give_private(slots)
        on_host = component.hosts[node.tenant]
        if host is not None and on_host is not None:
            on_host.give_private(host)
    return False


def _take_host(tree: Tree, node: Node, component: TreeComponent, slots: bytes) -> None:
    """The node's cell adopts a request's HOST slots; freed where it has some."""
    ledger = component.ledger(HOST, node.tenant)
    if node.cells[component.index].host is None:
        ledger.private -= len(slots) // SLOT_BYTES
        tree.put(node, component, HOST, slots)
    else:
        ledger.give_private(slots)


def _take(tree: Tree, node: Node, component: TreeComponent, slots: bytes, *, is_left: bool) -> None:
    """The node's empty cell adopts a request's DEVICE slots, as the youngest of its kind.

    Data that was just computed is not the next victim, even on an old node. Data with a copy on
    HOST was used before: it is not left behind.
    """
    cell = node.cells[component.index]
    behind = is_left and cell.host is None
    stamp = tree.clock - LEFT_BEHIND if behind else tree.clock
    if cell.queued:
        component.restamp(node, stamp)
    else:
        cell.stamp = stamp
    component.devices[node.tenant].private -= len(slots) // SLOT_BYTES
    tree.put(node, component, DEVICE, slots)
