"""The tree's pages of a sequence, and the tokens of it that a reach needs.

A second opinion: it compares tokens from the root on, tries every boundary, and shares no code with
matching, pinning or the planning of load-backs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraft.errors import ContractViolation
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import Request
from kvgraft.terms import Chunk, Everything, Leading, Trailing
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree

__all__ = [
    "NONE",
    "Pages",
    "Shelf",
    "check_not_cleared",
    "deepest",
    "follow",
    "is_root_of",
    "look",
    "needed",
    "slots_of",
]

Pages = Sequence[tuple[int, int]]
"""Ranges of pages `[start, end)`, in order and disjoint."""

NONE = b"\xff" * SLOT_BYTES
"""Marks a missing slot."""


class Shelf(NamedTuple):
    """The tree's pages of a sequence.

    Attributes:
        n_pages: pages for which nodes follow it.
        nodes: those nodes, root first; the last may follow it in part.
        gaps: per component, for DEVICE alone and for any tier: how many of the first `n` pages it
            cannot be read from, `[n_pages + 1]`.
        states: per component the same: the boundaries at which a state can be read.
    """

    n_pages: int
    nodes: list[Node]
    gaps: tuple[list[list[int]], list[list[int]]]
    states: tuple[list[set[int]], list[set[int]]]


def needed(component: TreeComponent, boundary: int, page_size: int) -> Pages:
    """Pages that a component's reach touches at a boundary, from its terms in tokens."""
    if component.is_state or not boundary:
        return ()
    tokens = boundary * page_size
    ranges: list[tuple[int, int]] = []
    for term in component.reach.terms:
        if isinstance(term, Everything):
            return ((0, boundary),)
        if isinstance(term, Trailing):
            ranges.append((max(0, tokens - term.tokens), tokens))
        elif isinstance(term, Leading):
            ranges.append((0, min(term.tokens, tokens)))
        elif isinstance(term, Chunk):
            ranges.append(((tokens - 1) // term.tokens * term.tokens, tokens))
        else:
            return tuple((span.start, span.end) for span in component.reach_pages.spans(boundary))
    pages: list[tuple[int, int]] = []
    for low, high in sorted((low // page_size, -(-high // page_size)) for low, high in ranges):
        if pages and low <= pages[-1][1]:
            pages[-1] = (pages[-1][0], max(pages[-1][1], high))
        else:
            pages.append((low, high))
    return pages


def _readable(node: Node, component: TreeComponent) -> tuple[bool, bool]:
    """Whether a cell can be read from DEVICE alone, and from any tier."""
    cell = node.cells[component.index]
    device, host = cell.device is not None, cell.host is not None
    if component.home_is_host:
        return device and host, host
    return device, device or host


def check_not_cleared(tree: Tree, request: Request) -> None:
    """An admitted request was matched again where its namespace was cleared since (M1)."""
    node = request.receipt.anchor
    while node.parent is not None:
        node = node.parent
    if node in tree.cleared or request.root is not node:
        raise ContractViolation(
            "M1",
            None,
            f"the request of {request.prompt} tokens is admitted with a match of "
            f"{request.anchor_tokens} in a tree of namespace {request.namespace!r} that was "
            "cleared",
        )


def is_root_of(tree: Tree, node: Node, namespace: object) -> bool:
    """Whether a root is the namespace's, or was until that was cleared."""
    if node in tree.cleared:
        return tree.cleared[node] == namespace
    return tree.roots.get(namespace) is node


def follow(
    tree: Tree, key: TokenKey, limit: int, root: Node | None = None
) -> tuple[list[Node], int]:
    """The nodes that follow a key from the root, and for how many pages, at most `limit`.

    The root is that of the key's namespace, unless another is given: a cleared one.
    """
    if root is None:
        root = tree.roots.get(key.namespace)
    data, size = bytes(key.data), tree.page_bytes
    nodes: list[Node] = []
    page, node = 0, root
    while node is not None and page < limit:
        first = data[page * size : (page + 1) * size]
        if len(first) < size:
            break
        below = [child for child in node.each_child() if child.key.startswith(first)]
        if not below:
            break
        (node,) = below
        nodes.append(node)
        edge = node.key
        agreed = 1
        while agreed < len(edge) // size and page + agreed < limit:
            low = agreed * size
            if data[page * size + low : page * size + low + size] != edge[low : low + size]:
                break
            agreed += 1
        page += agreed
        if agreed < len(edge) // size:
            break
    return nodes, page


def look(tree: Tree, key: TokenKey, limit: int) -> Shelf:
    """Follow a key from the root for at most `limit` pages, also through tombstones; O(pages)."""
    nodes, page = follow(tree, key, limit)
    gaps: tuple[list[list[int]], list[list[int]]] = ([], [])
    states: tuple[list[set[int]], list[set[int]]] = ([], [])
    for component in tree.components:
        for tier in (0, 1):
            counts, at = [0], set()
            for each in nodes:
                there = _readable(each, component)[tier]
                if there and each.end <= page:
                    at.add(each.end)
                missing = counts[-1]
                n_pages = min(each.end, page) - each.start
                if there:
                    counts += [missing] * n_pages
                else:
                    counts += range(missing + 1, missing + 1 + n_pages)
            gaps[tier].append(counts)
            states[tier].append(at)
    return Shelf(page, nodes, gaps, states)


def deepest(
    tree: Tree,
    shelf: Shelf,
    limit: int,
    *,
    device_only: bool,
    component: TreeComponent | None = None,
) -> int:
    """The deepest boundary at most `limit` that every component, or `component`, accepts."""
    tier = 0 if device_only else 1
    components = tree.components if component is None else (component,)
    boundary = min(limit, shelf.n_pages)
    while boundary > 0:
        for each in components:
            if each.is_state:
                if boundary not in shelf.states[tier][each.index]:
                    break
                continue
            counts = shelf.gaps[tier][each.index]
            if any(
                counts[high] != counts[low] for low, high in needed(each, boundary, tree.page_size)
            ):
                break
        else:
            return boundary
        boundary -= 1
    return 0


def slots_of(shelf: Shelf, component: TreeComponent, start: int, end: int) -> bytes:
    """DEVICE slots of a paged component for pages `[start, end)`; `NONE` where there is none."""
    size = component.slots_per_page
    parts: list[bytes] = []
    page = start
    for node in shelf.nodes:
        low, high = max(node.start, page), min(node.end, end, shelf.n_pages)
        if low >= high:
            continue
        slots = node.cells[component.index].device
        if slots is None:
            parts.append(NONE * ((high - low) * size))
        else:
            width = size * SLOT_BYTES
            parts.append(slots[(low - node.start) * width : (high - node.start) * width])
        page = high
    parts.append(NONE * ((end - page) * size))
    return b"".join(parts)
