"""Pins on HOST alone, for data on its way to or from STORAGE (S1, L8).

Held data may leave DEVICE meanwhile; the copy on HOST stays, and so does the node.
"""

from __future__ import annotations

from kvgraft.errors import LeaseError
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt, pin_host, release_host
from kvgraft.tree.segments import common_pages, default_segment, whole_nodes
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

__all__ = ["hold_host", "let_go_of_host", "parts_of"]


def hold_host(tree: Tree, node: Node, boundary: int | None = None) -> Receipt | None:
    """Pin `node`'s HOST data, of every component (T6).

    Of components that need every page, the nodes above are pinned too: a node with HOST data below
    it is no victim, and so not evictable in the ledger either. Returns None, with nothing pinned,
    where that takes slots promised to admitted requests (A12).

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
            spans = default_segment(component, node.end)
        elif node.parent is not None:
            spans = (Span(0 if component.is_prefix_closed else node.start, node.end),)
        segments.append(spans)
    receipt = Receipt(node, segments, 0)
    node.receipts += 1
    broken = False
    for component, segment in zip(tree.components, segments):
        pin_host(tree, component, node, segment, 0, 1)
        ledger = component.hosts[node.tenant]
        broken = broken or (ledger is not None and ledger.headroom < 0)
    if broken:
        let_go_of_host(tree, receipt)
        return None
    return receipt


def let_go_of_host(tree: Tree, receipt: Receipt) -> None:
    """Undo `hold_host`, also after splits (L1).

    Raises:
        LeaseError: it was undone before (L2).
    """
    node = receipt.anchor
    if receipt.released:
        raise LeaseError(f"HOST hold of page {node.end}: already released; release it once")
    receipt.released = True
    node.receipts -= 1
    release_host(tree, receipt)
    if node.parent is not None and not node.live_device and not node.live_host:
        tree.remove_dead(node)


def _needed(component: TreeComponent, node: Node, boundary: int) -> tuple[Span, ...]:
    """The part of a component's reach at a boundary that lies on a node and those above."""
    if component.is_state:
        return default_segment(component, boundary) if node.end == boundary else ()
    reach = default_segment(component, boundary)
    return whole_nodes(node, common_pages(reach, (Span(0, node.end),)))


def parts_of(node: Node, start: int) -> list[Node]:
    """The parts of a split node that began at page `start`, root first; none if it is gone."""
    parts: list[Node] = []
    part: Node | None = node
    while part is not None and part.parent is not None and part.end > start:
        parts.append(part)
        part = part.parent
    parts.reverse()
    return parts
