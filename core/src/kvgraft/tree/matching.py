"""Finding the anchor: the deepest boundary every component can resume from (M1 to M6).

Two steps. `walk` follows the key down the tree. `_deepest` then looks upwards from the end of that
path for a boundary all reaches accept. The search is short because reaches only look back: a page
that a boundary needs is needed at every boundary between, so if it is missing the next boundary to
try is the page's own start. Its cost is O(path + components), independent of the rest of the tree.

Matching changes nothing and allocates no slot; `kvgraft.tree.pinning` makes a match last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey, common_prefix_pages
from kvgraft.tree.node import KINDS, Cell, Node
from kvgraft.tree.tree import FURTHEST_NODES, Tree
from kvgraft.types import PointKind

BRANCH: Final = PointKind.BRANCH

COST_UNIT: Final = 1024
"""The cost of computing a page again, for each lost page that makes it necessary."""


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
        node: the node at whose end, or inside which, the anchor lies; the root at boundary 0.
        anchor: deepest boundary all components accept on DEVICE or HOST (M1).
        device_anchor: deepest boundary they accept from DEVICE alone (M3).
        base: deepest boundary with data of the base component on any tier.
        root: the namespace's root.
    """

    node: Node
    anchor: int
    device_anchor: int
    base: int
    root: Node


def walk(tree: Tree, root: Node, key: TokenKey, limit: int) -> tuple[Node, int]:
    """Follow `key` for at most `limit` pages; stops where a prefix-closed component has no data.

    Starts at the node where the key was last found, if it is still in the tree: keys only grow and
    nodes keep the boundary at their end, so the tokens above need no comparison.

    Returns:
        The last node reached, and the pages matched: up to its end, or inside it.
    """
    #   root ──[0..4)── A ──[4..8)── B ──[8..12)── C        the key was last found at A, and agrees
    #                   └ starts here                       with C's edge up to page 10: (C, 10)
    # Invariant: the path to `node` equals the key's first `offset` bytes, and every prefix-closed
    # component has data on each node of it, on some tier.
    data, page_bytes, prefix_closed = key.data, tree.page_bytes, tree.prefix_closed
    limit_bytes = limit * page_bytes
    node = _known(key, root, limit)
    if prefix_closed and node is not root and not _on_device(node, prefix_closed):
        gap: Node | None = None
        for passed in _upwards(node):
            if not _walkable(passed, prefix_closed):
                gap = passed
        if gap is not None:
            assert gap.parent is not None
            return gap.parent, gap.start
    alone = _alone(prefix_closed)
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
                if (alone < 0 or child.cells[alone].device is None) and not _walkable(
                    child, prefix_closed
                ):
                    break
                node, offset = child, end
                continue
            if not data.startswith(edge[:page_bytes], offset):
                break
        else:
            found = node.child(bytes(data[offset : offset + page_bytes]))
            if found is None:
                break
            child = found
            edge = child.key
            end = offset + len(edge)
        if not _walkable(child, prefix_closed):
            break
        if end > limit_bytes or not data.startswith(edge, offset):
            pages = common_prefix_pages(data, offset, edge, page_bytes)
            return child, min(child.start + pages, limit)
        node, offset = child, end
    return node, offset // page_bytes


def follow(
    tree: Tree, root: Node, tokens: bytes | bytearray, limit: int, nodes: list[Node] | None = None
) -> Path:
    """Follow tokens for at most `limit` pages, also through tombstones.

    Args:
        tree: the tree.
        root: where they begin.
        tokens: int32 bytes.
        limit: most pages.
        nodes: the known first nodes of the path, which goes on from there.
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
    nodes = list(_upwards(_known(key, root, limit)))
    nodes.reverse()
    return follow(tree, root, key.data, limit, nodes)


def _known(key: TokenKey, root: Node, limit: int) -> Node:
    """The deepest node within `limit` that is known to be on the key's path, or the root.

    The one it was last found at, unless that left the tree or belongs to another. A leaf may have
    grown since, and have been cut: of what lies behind, the key's tokens are not known.
    """
    node = key.trail
    if node is None or key.trail_root is not root:
        return root
    limit = min(limit, key.trail_end)
    while node is not None and node.end > limit:
        node = node.parent
    return node if node is not None and node.parent is not None else root


def _upwards(node: Node) -> Iterator[Node]:
    """`node` and those above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def _on_device(node: Node, prefix_closed: tuple[TreeComponent, ...]) -> bool:
    """Whether every prefix-closed component is on DEVICE here, and so on all nodes above (T5)."""
    for component in prefix_closed:
        if component.home_is_host or node.cells[component.index].device is None:
            return False
    return True


def _alone(prefix_closed: tuple[TreeComponent, ...]) -> int:
    """The only prefix-closed component, by index, if its home is DEVICE; -1 else.

    Its data there says alone that a node is walkable: nearly every node of nearly every tree.
    """
    if len(prefix_closed) != 1 or prefix_closed[0].home_is_host:
        return -1
    return prefix_closed[0].index


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
    node: Node, boundary: int, component: TreeComponent, *, device_only: bool
) -> Node | None:
    """The deepest node from `node` up where `component` lacks data it needs at `boundary`."""
    position = component.index
    above: Node | None = node
    if component.is_state:
        there = readable(node.cells[position], component, device_only=device_only)
        return None if there and node.end == boundary else node
    if component.is_prefix_closed:
        # DEVICE data is prefix closed (T5), and `walk` checked both tiers together on the way.
        there = not device_only or readable(node.cells[position], component, device_only=True)
        return None if there else node
    if component.window_pages is not None:
        #   boundary 9, window 3:  [0..4)  [4..7)  [7..9)     upwards until a node ends at low = 6
        low, hosted = max(0, boundary - component.window_pages), component.home_is_host
        while node.end > low:
            cell = node.cells[position]
            there = cell.device is not None and not hosted
            if not there and not readable(cell, component, device_only=device_only):
                return node
            node = node.parent  # type: ignore[assignment]
        return None
    for span in reversed(component.reach_pages.spans(boundary)):
        while above is not None and above.end > span.start:
            if above.start < span.end and not readable(
                above.cells[position], component, device_only=device_only
            ):
                return above
            if above.start <= span.start:
                break
            above = above.parent
    return None


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


def _deepest(
    components: Sequence[TreeComponent], node: Node, boundary: int, *, device_only: bool
) -> tuple[Node, int]:
    """The deepest boundary at most `boundary` that `components` accept, from `node` up.

    Returns:
        Its node and its page; the root and 0 if there is none.
    """
    #   boundary 12 ─ a window lacks a page ─► 9 ─ no state stands there ─► 8 ─ all accept ─► return
    # No boundary between two tries is accepted by the component that failed the deeper one, so the
    # first that all accept is the deepest.
    while node.parent is not None:
        if node.start >= boundary:
            node = node.parent
            continue
        for component in components:
            gap = _first_gap(node, boundary, component, device_only=device_only)
            if gap is not None:
                boundary = _boundary_before(gap, boundary, component)
                node = gap
                break
        else:
            return node, boundary
    return node, 0


def match(tree: Tree, key: TokenKey, limit: int) -> Match:
    """Anchor and device anchor of the first `limit` pages of `key`; changes nothing (M6)."""
    root = tree.root(key.namespace)
    node, end = walk(tree, root, key, limit)
    return resolve(tree, node, end, root)


def resolve(tree: Tree, node: Node, end: int, root: Node) -> Match:
    """Anchors at most `end` pages deep on the path to `node`, where every tier together has data.

    Args:
        tree: the tree.
        node: the node at whose end, or inside which, page `end` lies, or one below it.
        end: the deepest boundary to consider; the match's `base`.
        root: the namespace's root.
    """
    device_node, device_anchor = _deepest(tree.checks, node, end, device_only=True)
    if device_anchor == end:
        return Match(device_node, end, end, end, root)
    node, anchor = _deepest(tree.checks, node, end, device_only=False)
    return Match(node, anchor, device_anchor, end, root)


def cost_of_losing(component: TreeComponent, node: Node) -> int:
    """Pages that a hit computes again without the component's data on `node`; see `Pool.cost`.

    At the deepest boundary behind `node` that needs it, back to the one before at which the
    component could resume, from any tier; for each of the pages that the boundary needs, in 1/1024
    of a page. 0 for a node that left the tree, and where no boundary has all its data.

    If a single sequence went on from that boundary to a deeper one, it comes back to the deeper
    one. Only hits between the two need the first, so their share is the pages between.
    """
    if node.parent is None:
        return 0
    alone = (component,)
    end, boundary, pages = node, node.end, 1
    if not component.is_state:
        reach = component.window_pages or 0
        while (
            isinstance(end.children, Node)
            and end.children.start - node.end < reach
            and readable(end.children.cells[component.index], component, device_only=False)
        ):
            end = end.children
        end, boundary = _deepest(alone, end, end.end, device_only=False)
        if boundary <= node.start:
            return 0
        pages = component.reach_pages.width(boundary)
    _, before = _deepest(alone, node.parent, node.start, device_only=False)
    gained = boundary - before
    parted = len(end.points) == end.end - end.start and KINDS[end.points[-1]] is BRANCH
    if end.end == boundary and not parted:  # no sequences were seen to part there
        further = _next_boundary(component, end) - boundary
        if further > 0:
            return gained * further * COST_UNIT // (gained + further) // max(1, pages)
    return gained * COST_UNIT // max(1, pages)


def _next_boundary(component: TreeComponent, node: Node) -> int:
    """The next boundary on the only line below `node` at which the component can resume; else 0."""
    below = node.children
    for _ in range(FURTHEST_NODES):
        if not isinstance(below, Node):
            break
        if readable(below.cells[component.index], component, device_only=False):
            _, boundary = _deepest((component,), below, below.end, device_only=False)
            if boundary > below.start:
                return boundary
        below = below.children
    return 0


def anchor_node(tree: Tree, found: Match) -> Node:
    """The node ending at the match's anchor; splits the one it lies inside (M6)."""
    node = found.node
    return tree.split(node, found.anchor) if node.end > found.anchor else node


def missing_from(tree: Tree, found: Match) -> int | None:
    """First page of the shallowest node that a load-back reads; None if all data is on DEVICE."""
    if found.device_anchor == found.anchor:
        return None
    starts = [
        node.start
        for component in tree.components
        for node in needed_nodes(found, component)
        if node.cells[component.index].device is None
    ]
    return min(starts, default=None)


def needed_nodes(found: Match, component: TreeComponent) -> Iterator[Node]:
    """The nodes on which `component` needs data at the match's anchor, deep first."""
    if component.is_state:
        if found.anchor:
            yield found.node
        return
    spans = component.reach_pages.spans(found.anchor)
    for node in _upwards(found.node):
        if any(node.start < span.end and node.end > span.start for span in spans):
            yield node
