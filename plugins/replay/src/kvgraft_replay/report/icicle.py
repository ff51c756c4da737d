"""The prefix tree as an icicle: token depth from left to right, one row of height per leaf."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvgraft_replay.report.plot import SIZE, Tick, ticks

if TYPE_CHECKING:
    from kvgraft_replay.report.schema import TreeNode, TreeSnapshot

__all__ = ["RESIDENCIES", "Icicle", "Rect", "icicle"]

RESIDENCIES = ("device", "both", "host", "none")


class Rect(NamedTuple):
    """A node's place in plot units; `node` points into `Icicle.nodes`."""

    node: int
    x: float
    y: float
    width: float
    height: float
    pinned: bool


class Icicle(NamedTuple):
    """A tree ready to draw; `shares[component]` counts nodes by residency, as `RESIDENCIES`."""

    components: tuple[str, ...]
    nodes: tuple[TreeNode, ...]
    rects: tuple[Rect, ...]
    x_ticks: tuple[Tick, ...]
    n_leaves: int
    depth_tokens: int
    shares: dict[str, tuple[int, ...]]


def icicle(tree: TreeSnapshot) -> Icicle | None:
    """Lay the tree out; None if it holds no tokens.

    A node whose parent was left out of the snapshot becomes a root of its own. Nodes without
    tokens (the root) are not drawn.
    """
    nodes = tuple(node for node in tree["nodes"] if node["end"] > node["start"])
    if not nodes:
        return None
    depth = max(node["end"] for node in nodes)
    order, children = _top_down(nodes)
    leaves = [1] * len(nodes)
    reach = [node["end"] for node in nodes]
    for index in reversed(order):
        below = children[index]
        if below:
            leaves[index] = sum(leaves[child] for child in below)
            reach[index] = max(reach[child] for child in below)
    # Longest conversations first, for a smooth outline.
    for below in children:
        below.sort(key=lambda child: (-reach[child], -leaves[child], nodes[child]["id"]))
    tops = _tops(children, leaves)
    n_leaves = max(sum(leaves[root] for root in children[-1]), 1)
    per_leaf = SIZE / n_leaves
    per_token = SIZE / depth
    rects = [
        Rect(
            index,
            round(node["start"] * per_token, 2),
            round(tops[index] * per_leaf, 2),
            round((node["end"] - node["start"]) * per_token, 2),
            round(leaves[index] * per_leaf, 2),
            node["pinned"],
        )
        for index, node in enumerate(nodes)
    ]
    # Pinned nodes are drawn last, so that no neighbour covers their outline.
    rects.sort(key=lambda rect: (rect.pinned, rect.node))
    components = tuple(dict.fromkeys(name for node in nodes for name in node["residency"]))
    shares = {
        name: tuple(
            sum(node["residency"].get(name, "none") == residency for node in nodes)
            for residency in RESIDENCIES
        )
        for name in components
    }
    axis = tuple(ticks(depth, 6, least=1.0))
    return Icicle(components, nodes, tuple(rects), axis, n_leaves, depth, shares)


def _top_down(nodes: tuple[TreeNode, ...]) -> tuple[list[int], list[list[int]]]:
    """Indices, parents before children, and children of each; the last list has the roots.

    Nodes in a loop (a damaged snapshot) are never reached, so they cannot hang the report.
    """
    place = {node["id"]: index for index, node in enumerate(nodes)}
    children: list[list[int]] = [[] for _ in range(len(nodes) + 1)]
    for index, node in enumerate(nodes):
        parent = node["parent"]
        children[-1 if parent is None else place.get(parent, -1)].append(index)
    order = list(children[-1])
    for index in order:
        order.extend(children[index])
    return order, children


def _tops(children: list[list[int]], leaves: list[int]) -> list[int]:
    """Each node's first row, in leaves from the top."""
    tops = [0] * len(leaves)
    rows: list[tuple[int, int]] = []

    def stack(siblings: list[int], top: int) -> None:
        for child in siblings:
            rows.append((child, top))
            top += leaves[child]

    stack(children[-1], 0)
    for index, top in rows:
        tops[index] = top
        stack(children[index], top)
    return tops
