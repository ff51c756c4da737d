"""Pins and receipts (L1 to L8).

A receipt names its anchor node and, per component, the page segments it pinned below it. Splits
keep the anchor's identity and copy pin counts to both parts, so walking up from the anchor over
the same pages finds exactly the pins that were taken, also after splits and evictions. Nodes
without data inside a segment are counted too: data that arrives on them later is pinned on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

from kvgraft.errors import LeaseError
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import DEVICE, HOST
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Span


def segment_ahead(component: TreeComponent, boundary: int, position: int) -> tuple[Span, ...]:
    """The part of the reach at a boundary that a request at page `position` still needs (L6)."""
    segment = component.segment_at(boundary)
    if position <= boundary or component.is_prefix_closed:
        return segment
    return common_pages(component.segment_at(position), segment)


def common_pages(segment: tuple[Span, ...], other: tuple[Span, ...]) -> tuple[Span, ...]:
    """Pages in both; each is in order and disjoint. O(spans)."""
    common: list[Span] = []
    mine, its = 0, 0
    while mine < len(segment) and its < len(other):
        start = max(segment[mine].start, other[its].start)
        end = min(segment[mine].end, other[its].end)
        if start < end:
            common.append(Span(start, end))
        if segment[mine].end == end:
            mine += 1
        else:
            its += 1
    return tuple(common)


def whole_nodes(anchor: Node, spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Spans extended to whole nodes."""
    grown: list[Span] = []
    for start, end in spans:
        low, high = start, end
        node: Node | None = anchor
        while node is not None and node.parent is not None and node.end > start:
            if node.start < end < node.end:
                high = node.end
            if node.start < start:
                low = node.start
            node = node.parent
        if grown and low <= grown[-1].end:
            grown[-1] = Span(grown[-1].start, max(grown[-1].end, high))
        else:
            grown.append(Span(low, high))
    return tuple(grown)


def pages_without(segment: tuple[Span, ...], kept: tuple[Span, ...]) -> tuple[Span, ...]:
    """Pages of `segment` outside `kept`; a state's empty span when nothing is kept."""
    given: list[Span] = []
    for span in segment:
        if span.start == span.end:
            given.append(span)
            continue
        low = span.start
        for keep in kept:
            if keep.end <= low or keep.start >= span.end:
                continue
            if keep.start > low:
                given.append(Span(low, keep.start))
            low = max(low, keep.end)
        if low < span.end:
            given.append(Span(low, span.end))
    return tuple(given)


NO_PAGE: Final = 1 << 40
"""Behind the last page of every sequence."""


class Receipt:
    """The handle that a pin returns and its release consumes (L2).

    Attributes:
        anchor: the node at whose end the pinned boundary lies.
        segments: per component, the pinned pages; a state's pin is the empty span at the anchor.
        host_from: HOST is pinned too from this page on; None if it is not.
        released: whether it was consumed.
        locks: releases the components' own locks with the pin; None if there are none.
        on_device: whether DEVICE is pinned; not by `hold_host`.
    """

    __slots__ = ("anchor", "host_from", "locks", "on_device", "released", "segments")

    def __init__(
        self,
        anchor: Node,
        segments: list[tuple[Span, ...]],
        host_from: int | None,
        locks: ExitStack | None = None,
        *,
        on_device: bool = True,
    ) -> None:
        self.anchor = anchor
        self.segments = segments
        self.host_from = host_from
        self.released = False
        self.locks = locks
        self.on_device = on_device


def acquire(
    tree: Tree,
    anchor: Node,
    *,
    host_from: int | None = None,
    touch: bool = True,
    segments: Sequence[tuple[Span, ...] | None] | None = None,
    enforce: bool = True,
    locks: ExitStack | None = None,
) -> Receipt | None:
    """Pin the pages of every component's reach at `anchor` (L3).

    Returns None, with nothing pinned, when pinning would take slots that were promised to admitted
    requests (A12). O(nodes in the segments).

    Args:
        tree: the tree.
        anchor: the node whose end is the boundary.
        host_from: pin HOST data from this page on as well.
        touch: whether this counts as a use for recency.
        segments: per component, pages to pin instead of the default; None keeps the default.
        enforce: refuse to go below zero headroom; False for a caller that held the same slots
            before.
        locks: releases the components' own locks: with the pin, or at once if nothing is pinned.
    """
    #   cell with data, no pin yet:  evictable -> pinned    other cells: one pin more, no slot moves
    # An empty cell is pinned, too: data that arrives there is pinned (L4). Headroom is free +
    # evictable - promised: below zero a promise would not be covered, so all pins are undone.
    boundary = anchor.end
    if touch:
        tree.tick()
        anchor.hits += 1
    stamp = tree.clock if touch else 0
    taken: list[tuple[Span, ...]] = []
    broken = False
    for component in tree.components:
        segment = segments[component.index] if segments is not None else None
        if segment is None:
            segment = component.segment_at(boundary)
        taken.append(segment)
        moved = 0
        if not segment:
            continue
        if component.is_state:
            moved = _pin_state(component, anchor, stamp)
        else:
            for span in segment:
                moved += _pin_span(tree, component, anchor, span, stamp)
        if moved:
            ledger = component.devices[anchor.tenant]
            ledger.evictable -= moved
            ledger.pinned += moved
            broken = broken or ledger.headroom < 0
    anchor.receipts += 1
    receipt = Receipt(anchor, taken, host_from, locks)
    if host_from is not None:
        for component, segment in zip(tree.components, taken):
            pin_host(tree, component, anchor, segment, host_from, 1)
            on_host = component.hosts[anchor.tenant]
            broken = broken or (on_host is not None and on_host.headroom < 0)
    if broken and enforce:
        release(tree, receipt)
        return None
    return receipt


def acquire_node(tree: Tree, node: Node, components: Sequence[TreeComponent]) -> Receipt | None:
    """Pin one whole node for a transfer of `components` (L8).

    Prefix-closed components are pinned from the root, as everywhere (T6); on the node itself the
    moved components and wider ones. Returns None, with nothing pinned, when that would take slots
    that were promised to admitted requests: the caller's receipt need not cover every component
    there (A12).
    """
    moving = {component.index for component in components}
    segments: list[tuple[Span, ...]] = []
    for component in tree.components:
        if component.is_prefix_closed:
            segments.append((Span(0, node.end),))
        elif moving.isdisjoint(component.narrower):
            segments.append(())
        elif component.is_state:
            segments.append((Span(node.end, node.end),))
        else:
            segments.append((Span(node.start, node.end),))
    # Pins on DEVICE keep a canonical copy on HOST, too. It is no victim then, so the ledger must
    # not count it as evictable.
    host_from = 0 if tree.homes_on_host else None
    return acquire(tree, node, host_from=host_from, touch=False, segments=segments)


def advance(tree: Tree, receipt: Receipt, anchor: Node, boundary: int) -> None:
    """Move a receipt from page `boundary` down to `anchor`: a request published pages (I5).

    `anchor` is below the receipt's own, or the same node, grown in place. Components that need
    every page are pinned on the new nodes too. For the others the request holds its own slots
    there, or left them behind. O(new nodes).
    """
    held = receipt.anchor
    held.receipts -= 1
    anchor.receipts += 1
    for component in tree.prefix_closed:
        index, ledger = component.index, component.devices[anchor.tenant]
        moved = 0
        node = anchor
        while node is not held:
            cell = node.cells[index]
            if not cell.device_pins and cell.device is not None:
                moved += len(cell.device) // SLOT_BYTES
            cell.device_pins += 1
            if cell.queued:
                component.hold(node)
            assert node.parent is not None
            node = node.parent
        ledger.evictable -= moved
        ledger.pinned += moved
        (span,) = receipt.segments[index] or (Span(0, 0),)
        added = Span(boundary, anchor.end)
        if receipt.host_from is not None:
            pin_host(tree, component, anchor, (added,), receipt.host_from, 1)
        receipt.segments[index] = (Span(span.start, anchor.end),)
    receipt.anchor = anchor


def release(tree: Tree, receipt: Receipt) -> None:
    """Undo `acquire` or `hold_host` on the same segments, also after splits (L1).

    Every component is notified, even if a hook raises.

    Raises:
        LeaseError: the receipt was released before, or belongs to other components (L2).
    """
    if receipt.released or len(receipt.segments) != len(tree.components):
        raise LeaseError(
            f"receipt for page {receipt.anchor.end}: "
            + ("already released" if receipt.released else "components are missing")
            + "; a receipt is released once, on the tree that gave it"
        )
    receipt.released = True
    anchor = receipt.anchor
    anchor.receipts -= 1
    if receipt.host_from is not None:
        release_host(tree, receipt)
    for component, segment in zip(tree.components, receipt.segments):
        if not segment or not receipt.on_device:
            continue
        if component.is_prefix_closed:
            _unpin_path(tree, component, anchor, segment[0])
        else:
            _unpin(tree, component, anchor, segment)
    if anchor.parent is not None and not anchor.live_device and not anchor.live_host:
        tree.prune(anchor)
    if receipt.locks is not None:
        receipt.locks.close()


def release_host(tree: Tree, receipt: Receipt) -> None:
    """Release the HOST part of a receipt, once its data is on DEVICE."""
    if receipt.host_from is None:
        return
    host_from, receipt.host_from = receipt.host_from, None
    for component, segment in zip(tree.components, receipt.segments):
        pin_host(tree, component, receipt.anchor, segment, host_from, -1)


def slide(tree: Tree, receipt: Receipt, position: int) -> None:
    """Unpin pages that a request at page `position` no longer reaches (L6).

    The receipt notes that, so its release later undoes only the rest. Whole nodes only.
    """
    #   segment  [a......b......c......d)      nodes a..b, b..c, c..d
    #   reach              [x.....position)    begins at x, inside b..c
    #   kept            [b.............d)      whole nodes: a..b is unpinned
    anchor = receipt.anchor
    for component in tree.components:
        segment = receipt.segments[component.index]
        if not segment or component.is_prefix_closed:
            continue
        window = component.window_pages
        if window is not None and position - window <= segment[0].start:
            continue
        if component.is_state:
            if position != anchor.end:
                receipt.segments[component.index] = ()
                if receipt.host_from is not None:
                    pin_host(tree, component, anchor, segment, receipt.host_from, -1)
                _unpin(tree, component, anchor, segment)
            continue
        kept: tuple[Span, ...]
        given: tuple[Span, ...]
        if window is not None and position - window >= segment[-1].end:
            kept, given = (), segment
        elif window is not None and len(segment) == 1:
            # The usual case of the general rule below: a window slides within one span.
            node = anchor
            while node.start > position - window:
                node = node.parent  # type: ignore[assignment]
            start, end = segment[0]
            if node.start <= start:
                continue
            kept = (Span(node.start, end),)
            given = (Span(start, node.start),)
        else:
            kept = common_pages(component.segment_at(position), segment)
            if kept == segment:
                continue
            kept = whole_nodes(anchor, kept)
            if kept == segment:
                continue
            given = pages_without(segment, kept)
        receipt.segments[component.index] = kept
        if receipt.host_from is not None:
            pin_host(tree, component, anchor, given, receipt.host_from, -1)
        _unpin(tree, component, anchor, given)


def _pin_state(component: TreeComponent, anchor: Node, stamp: int) -> int:
    """Pin a state at the anchor; slots that stopped being evictable."""
    cell = anchor.cells[component.index]
    cell.device_pins += 1
    if cell.queued:
        component.hold(anchor)
    if stamp:
        component.restamp(anchor, stamp)
    if cell.device_pins == 1 and cell.device is not None:
        return len(cell.device) // SLOT_BYTES
    return 0


def _pin_span(tree: Tree, component: TreeComponent, anchor: Node, span: Span, stamp: int) -> int:
    """Pin a span from `anchor` upwards; slots that stopped being evictable."""
    #   root ── ... ──[low ──────── high)── ... ── anchor     nodes are cut at low and high
    # Each cell in between gets one pin more; slots of cells without pins: evictable -> pinned.
    # Of a component that needs every page, nodes with a pin lie above those without (T6), and so
    # do nodes with data (T5): the pages between are all that moves, and the lowest node with data
    # is the only candidate on DEVICE.
    index = component.index
    if component.is_prefix_closed:
        node, lowest, on_host = anchor, _lowest(anchor, index), component.home_is_host
        while (above := node.parent) is not None and not (cell := node.cells[index]).device_pins:
            cell.device_pins = 1
            if on_host:
                component.hold(node)
            node = above
        moved = lowest.end - node.end
        while (above := node.parent) is not None:
            node.cells[index].device_pins += 1
            node = above
        if lowest.cells[index].queued:
            component.hold(lowest)
        if stamp:
            component.restamp(anchor, stamp)
        return moved * component.slots_per_page if moved > 0 else 0
    low, high = span
    moved, node, queue = 0, anchor, component.device.queue
    while node.start >= high:
        node = node.parent  # type: ignore[assignment]
    if node.end > high:
        node = tree.split(node, high)
    while node.end > low:
        if node.start < low:
            tree.split(node, low)
        cell = node.cells[index]
        pins = cell.device_pins
        if not pins and cell.device is not None:
            moved += len(cell.device)
        cell.device_pins = pins + 1
        if cell.queued:
            queue.withdraw(node)
            if cell.queued:
                component.hold(node)
        if stamp and cell.queued:
            component.restamp(node, stamp)
        elif stamp:
            cell.stamp = stamp
        node = node.parent  # type: ignore[assignment]
    return moved // SLOT_BYTES


def _lowest(node: Node, index: int) -> Node:
    """The lowest of a node and those above with a component's data on DEVICE; else the root."""
    while node.cells[index].device is None and node.parent is not None:
        node = node.parent
    return node


def _unpin_path(tree: Tree, component: TreeComponent, anchor: Node, span: Span) -> None:
    """`_unpin` of a component that needs every page."""
    #   root ── 3 ── 3 ── 1 ── 1 anchor     pins do not rise downwards (T6): of the cells without
    #   ...     2    2    0    0            a pin the lowest with data may be a candidate
    index = component.index
    lowest = anchor
    while lowest.end > span.end:
        lowest = lowest.parent  # type: ignore[assignment]
    node = lowest
    while (above := node.parent) is not None and (cell := node.cells[index]).device_pins == 1:
        cell.device_pins = 0
        node = above
    held = node
    while (above := node.parent) is not None:
        node.cells[index].device_pins -= 1
        node = above
    node = lowest
    while component.home_is_host and node is not held:
        if tree.is_candidate(node, component, HOST):
            component.pool(HOST).queue.push(node)
        node = node.parent  # type: ignore[assignment]
    lowest = _lowest(lowest, index)
    moved = (lowest.end - held.end) * component.slots_per_page
    if moved > 0:
        ledger = component.devices[anchor.tenant]
        ledger.pinned -= moved
        ledger.evictable += moved
        if tree.is_leaf(lowest, DEVICE):
            component.device.queue.push(lowest)


def _unpin(tree: Tree, component: TreeComponent, anchor: Node, segment: tuple[Span, ...]) -> None:
    """Undo pins on DEVICE over `segment`; cells that became evictable are entered as candidates."""
    #   last pin of a cell with data:  pinned -> evictable, and a candidate
    index, moved, queue = component.index, 0, component.device.queue
    for start, high in segment:
        node = anchor
        while node.end > high:
            node = node.parent  # type: ignore[assignment]
        low = node.start if component.is_state else start
        while node.end > low:
            cell = node.cells[index]
            cell.device_pins = pins = cell.device_pins - 1
            if not pins:
                if (slots := cell.device) is not None:
                    moved += len(slots)
                    queue.push(node)
                if component.home_is_host and tree.is_candidate(node, component, HOST):
                    component.pool(HOST).queue.push(node)
            node = node.parent  # type: ignore[assignment]
    if moved:
        ledger = component.devices[anchor.tenant]
        ledger.pinned -= moved // SLOT_BYTES
        ledger.evictable += moved // SLOT_BYTES


def pin_host(
    tree: Tree,
    component: TreeComponent,
    anchor: Node,
    segment: tuple[Span, ...],
    host_from: int,
    step: int,
) -> None:
    """Add `step` HOST pins over `segment` from page `host_from` on."""
    #   first pin of a cell with data:  evictable -> pinned      last pin released:  back
    index, pool, edge = component.index, component.host, int(step > 0)
    moved = 0
    nodes: list[Node] = []
    if component.is_state:
        nodes = [anchor] if segment else []
    else:
        for low, high in segment:
            node = anchor
            low = max(low, host_from)  # noqa: PLW2901
            while node.end > low:
                if node.end <= high:
                    nodes.append(node)
                node = node.parent  # type: ignore[assignment]
    for node in nodes:
        cell = node.cells[index]
        cell.host_pins += step
        if pool is not None and cell.host is not None and cell.host_pins == edge:
            moved += len(cell.host) // SLOT_BYTES
            if step > 0:
                pool.queue.withdraw(node)
            elif tree.is_candidate(node, component, HOST):
                pool.queue.push(node)
    ledger = component.hosts[anchor.tenant]
    if moved and ledger is not None:
        ledger.pinned += step * moved
        ledger.evictable -= step * moved


def hold_host(tree: Tree, node: Node, boundary: int | None = None) -> Receipt | None:
    """Pin `node`'s HOST data, of every component (T6).

    For components that need every page the nodes above are pinned too: a node with HOST data below
    it is no victim, so the ledger must not count it as evictable. Returns None, with nothing
    pinned, if that takes slots promised to admitted requests (A12).

    Args:
        tree: the tree.
        node: a node of it, or a root.
        boundary: pin the data of `node` and the nodes above that the components need at this
            boundary, in pages, instead. It may lie behind the node's end.
    """
    segments: list[tuple[Span, ...]] = []
    for component in tree.components:
        spans: tuple[Span, ...] = ()
        if node.parent is not None and boundary is not None:
            spans = _needed(component, node, boundary)
        elif node.parent is not None and component.is_state:
            spans = component.segment_at(node.end)
        elif node.parent is not None:
            spans = (Span(0 if component.is_prefix_closed else node.start, node.end),)
        segments.append(spans)
    receipt = Receipt(node, segments, 0, on_device=False)
    node.receipts += 1
    broken = False
    for component, segment in zip(tree.components, segments):
        pin_host(tree, component, node, segment, 0, 1)
        ledger = component.hosts[node.tenant]
        broken = broken or (ledger is not None and ledger.headroom < 0)
    if broken:
        release(tree, receipt)
        return None
    return receipt


def _needed(component: TreeComponent, node: Node, boundary: int) -> tuple[Span, ...]:
    """The part of a component's reach at a boundary that lies on a node and those above."""
    if component.is_state:
        return component.segment_at(boundary) if node.end == boundary else ()
    reach = component.segment_at(boundary)
    return whole_nodes(node, common_pages(reach, (Span(0, node.end),)))
