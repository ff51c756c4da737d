"""Finding the anchor: the deepest boundary every component can resume from (M1 to M6).

Two steps. `walk` follows the key down the tree. `_deepest` then looks upwards from the end of that
path for a boundary all reaches accept. The search is short because reaches only look back: a page
that is needed at a boundary is needed at every boundary between it and there, so where it is
missing the next one to try is the page's own. Its cost is O(path + components), independent of the
rest of the tree.

Matching changes nothing and allocates no slot; `kvgraft.tree.pinning` makes a match last.
"""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey, common_prefix_pages
from kvgraft.tree.node import Cell, Node
from kvgraft.tree.tree import Tree

__all__ = [
    "Match",
    "Path",
    "anchor_node",
    "follow",
    "follow_key",
    "match",
    "missing_from",
    "readable",
    "resolve",
    "walk",
]


class Path(NamedTuple):
    """Nodes a key follows.

    Attributes:
        nodes: from below the root; the last one may match in part.
        end: pages matched; inside the last node when that matches in part.
    """

    nodes: list[Node]
    end: int


class Match(NamedTuple):
    """The tree's match of a key; boundaries in pages.

    Attributes:
        path: nodes up to the anchor; the anchor may lie inside the last.
        anchor: deepest boundary all components accept on DEVICE or HOST (M1).
        device_anchor: deepest boundary they accept from DEVICE alone (M3).
        base: deepest boundary with data of the base component on any tier.
        root: the namespace's root.
    """

    path: list[Node]
    anchor: int
    device_anchor: int
    base: int
    root: Node


def walk(tree: Tree, root: Node, key: TokenKey, limit: int) -> Path:
    """Follow `key` for at most `limit` pages; stops where a prefix-closed component has no data.

    Starts at the node the key was last found at, if it still stands: keys only grow and nodes keep
    the boundary at their end, so the tokens above need no comparing.
    """
    data, page_bytes, prefix_closed = key.data, tree.page_bytes, tree.prefix_closed
    limit_bytes = limit * page_bytes
    nodes = _trail(key, root, limit)
    node = nodes[-1] if nodes else root
    if prefix_closed and not _on_device(node, prefix_closed):
        for position, passed in enumerate(nodes):
            if not _walkable(passed, prefix_closed):
                return Path(nodes[:position], passed.start)
    offset = node.end * page_bytes
    while offset < limit_bytes:
        children = node.children
        if children is None:
            break
        if isinstance(children, Node):
            child = children
            edge = child.key
            end = offset + len(edge)
            if end <= limit_bytes and data.startswith(edge, offset):
                if not _walkable(child, prefix_closed):
                    break
                nodes.append(child)
                node, offset = child, end
                continue
            if not data.startswith(edge[:page_bytes], offset):
                break
        else:
            found = children.get(bytes(data[offset : offset + page_bytes]))
            if found is None:
                break
            child = found
            edge = child.key
            end = offset + len(edge)
        if not _walkable(child, prefix_closed):
            break
        nodes.append(child)
        if end > limit_bytes or not data.startswith(edge, offset):
            pages = common_prefix_pages(data, offset, edge, page_bytes)
            return Path(nodes, min(child.start + pages, limit))
        node, offset = child, end
    return Path(nodes, offset // page_bytes)


def follow(
    tree: Tree, root: Node, tokens: bytes | bytearray, limit: int, nodes: list[Node] | None = None
) -> Path:
    """Follow tokens for at most `limit` pages, also through tombstones.

    Args:
        tree: the tree.
        root: where they begin.
        tokens: int32 bytes.
        limit: most pages.
        nodes: the first nodes of the path, where they are known; the path goes on from there.
    """
    page_bytes = tree.page_bytes
    nodes = nodes if nodes is not None else []
    node = nodes[-1] if nodes else root
    page = node.end
    while page < limit:
        offset = page * page_bytes
        child = node.child(bytes(tokens[offset : offset + page_bytes]))
        if child is None:
            break
        if tokens.startswith(child.key, offset):
            agreed = child.end - child.start
        else:
            agreed = common_prefix_pages(tokens, offset, child.key, page_bytes)
        nodes.append(child)
        page = min(child.start + agreed, limit)
        if page < child.end:
            break
        node = child
    return Path(nodes, page)


def follow_key(tree: Tree, key: TokenKey, limit: int) -> Path:
    """`follow`, from the node the key was last found at."""
    root = tree.root(key.namespace)
    return follow(tree, root, key.data, limit, _trail(key, root, limit))


def _trail(key: TokenKey, root: Node, limit: int) -> list[Node]:
    """The path to the node the key was last found at, as far as it lies within `limit`."""
    nodes: list[Node] = []
    node = key.trail
    if node is not None and node.end != key.trail_end:
        node = node.parent
    while node is not None and node is not root:
        if node.end <= limit:
            nodes.append(node)
        node = node.parent
    if node is None:
        return []  # the node left the tree, or belongs to another
    nodes.reverse()
    return nodes


def _on_device(node: Node, prefix_closed: tuple[TreeComponent, ...]) -> bool:
    """Whether every prefix-closed component is on DEVICE here, and so on all nodes above (T5)."""
    for component in prefix_closed:
        if component.home_is_host or node.cells[component.index].device is None:
            return False
    return True


def _walkable(node: Node, prefix_closed: tuple[TreeComponent, ...]) -> bool:
    """Whether every prefix-closed component has data on some tier."""
    for component in prefix_closed:
        cell = node.cells[component.index]
        if cell.host is None and (cell.device is None or component.home_is_host):
            return False
    return True


def readable(cell: Cell, component: TreeComponent, *, device_only: bool) -> bool:
    """Whether a cell's data can be used: at once, or after a load-back."""
    if component.home_is_host:
        return cell.host is not None and (not device_only or cell.device is not None)
    return cell.device is not None or (not device_only and cell.host is not None)


def _first_gap(
    nodes: list[Node], index: int, boundary: int, component: TreeComponent, *, device_only: bool
) -> int:
    """Index of the deepest node up to `index` where `component` lacks data it needs; -1 if none."""
    position = component.index
    if component.is_state:
        node = nodes[index]
        cell = node.cells[position]
        return (
            -1
            if node.end == boundary and readable(cell, component, device_only=device_only)
            else index
        )
    if component.is_prefix_closed:
        # DEVICE data is prefix closed (T5), and `walk` went only where every tier together is.
        if not device_only or readable(nodes[index].cells[position], component, device_only=True):
            return -1
        return index
    if component.window_pages is not None:
        low = boundary - component.window_pages
        while index >= 0 and nodes[index].end > low:
            if not readable(nodes[index].cells[position], component, device_only=device_only):
                return index
            index -= 1
        return -1
    for span in reversed(component.reach_pages.spans(boundary)):
        while index >= 0 and nodes[index].end > span.start:
            if nodes[index].start < span.end and not readable(
                nodes[index].cells[position], component, device_only=device_only
            ):
                return index
            if nodes[index].start <= span.start:
                break
            index -= 1
    return -1


def _boundary_before(node: Node, boundary: int, component: TreeComponent) -> int:
    """The deepest boundary to try: `component` lacks data on `node` that `boundary` needs.

    All pages of the node that are needed there are missing, and the first of them is needed at
    every boundary behind it. A reach that ends at its boundary needs the node's own pages at every
    boundary inside it.
    """
    if component.ends_at_boundary:
        return node.start
    for span in component.reach_pages.spans(boundary):
        if span.end > node.start:
            return max(span.start, node.start)
    return node.start


def _deepest(tree: Tree, nodes: list[Node], boundary: int, *, device_only: bool) -> tuple[int, int]:
    """Deepest accepted boundary at most `boundary`, and the index of its node; (0, -1) if none."""
    index = len(nodes) - 1
    while index >= 0 and nodes[index].start >= boundary:
        index -= 1
    while index >= 0:
        for component in tree.checks:
            gap = _first_gap(nodes, index, boundary, component, device_only=device_only)
            if gap >= 0:
                boundary = _boundary_before(nodes[gap], boundary, component)
                index = gap if boundary > nodes[gap].start else gap - 1
                break
        else:
            return boundary, index
    return 0, -1


def match(tree: Tree, key: TokenKey, limit: int) -> Match:
    """Anchor and device anchor of the first `limit` pages of `key`; changes nothing (M6)."""
    root = tree.root(key.namespace)
    path = walk(tree, root, key, limit)
    return resolve(tree, path, root, path.end)


def resolve(tree: Tree, path: Path, root: Node, limit: int) -> Match:
    """Anchors at most `limit` pages deep on a path walked already."""
    nodes, end = path.nodes, min(path.end, limit)
    device_anchor, index = _deepest(tree, nodes, end, device_only=True)
    anchor = device_anchor
    if device_anchor < end:
        anchor, index = _deepest(tree, nodes, end, device_only=False)
    return Match(nodes[: index + 1], anchor, device_anchor, path.end, root)


def anchor_node(tree: Tree, found: Match) -> Node:
    """The node ending at the match's anchor; splits the one it lies inside (M6)."""
    if not found.path:
        return found.root
    node = found.path[-1]
    if node.end > found.anchor:
        node = found.path[-1] = tree.split(node, found.anchor)
    return node


def _needed(found: Match, component: TreeComponent) -> list[Node]:
    """Nodes of the path on which `component` needs data at the anchor."""
    if component.is_state:
        return found.path[-1:]
    spans = component.reach_pages.spans(found.anchor)
    return [
        node
        for node in found.path
        if any(node.start < span.end and node.end > span.start for span in spans)
    ]


def missing_from(tree: Tree, found: Match) -> int | None:
    """First page of the shallowest node a load-back reads; None if all is on DEVICE."""
    if found.device_anchor == found.anchor:
        return None
    starts = [
        node.start
        for component in tree.components
        for node in _needed(found, component)
        if node.cells[component.index].device is None
    ]
    return min(starts, default=None)
