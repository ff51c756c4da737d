"""Trees over pools without memory, filled the way a cache fills them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvgraft import Everything, Reach, StateAt, Tier, TokenKey, Trailing
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.tree import inserting, operations
from kvgraft.tree.component import ComponentShape, TreeComponent
from kvgraft.tree.inserting import Holding, Run
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree

__all__ = ["PAGE", "SHAPES", "back_up", "grown", "insert", "open_tree", "path"]

PAGE = 2

SHAPES = {
    "full": ComponentShape("full", Reach(Everything())),
    "window": ComponentShape("window", Reach(Trailing(4))),
    "state": ComponentShape("state", Reach(StateAt())),
    "homed": ComponentShape("homed", Reach(Everything()), Tier.HOST),
}


def open_tree(*names: str, capacity: int = 32, closed_host: bool = True) -> Tree:
    """An empty tree of the named shapes with a host tier."""
    return Tree(
        PAGE,
        [SHAPES[name] for name in names],
        {name: Ledger(name, Tier.DEVICE, SlotAllocator(capacity)) for name in names},
        {name: Ledger(name, Tier.HOST, SlotAllocator(capacity)) for name in names},
        prefix_closed_host=closed_host,
    )


def queued(tree: Tree, inserted: inserting.Inserted) -> Node:
    """The anchor, once the nodes that gained data are entered as candidates."""
    for node in inserted.nodes:
        tree.queue_candidates(node)
    return inserted.anchor


def insert(
    tree: Tree,
    tokens: Iterable[int],
    *,
    without: Sequence[str] = (),
    behind: dict[str, int] | None = None,
    namespace: object = None,
) -> Node:
    """Insert a whole sequence, as a request that ends would; returns the node at its end.

    Args:
        tree: the tree.
        tokens: the sequence, whole pages.
        without: components that offer nothing.
        behind: per component, the first page still held; earlier ones were given back.
        namespace: of the sequence.
    """
    key = TokenKey(list(tokens), namespace)
    end = key.n_tokens // PAGE
    holdings = []
    for component in tree.components:
        if component.name in without:
            holdings.append(Holding([], {}))
        elif component.is_state:
            holdings.append(Holding([], {end: _taken(component.devices[0], 1)}))
        else:
            holdings.append(
                Holding([_run(component, (behind or {}).get(component.name, 0), end)], {})
            )
    return queued(tree, inserting.insert(tree, tree.root(namespace), key, end, holdings))


def _run(component: TreeComponent, first: int, end: int) -> Run:
    host = None
    if component.home_is_host:
        (on_host,) = component.hosts
        assert on_host is not None
        host = _taken(on_host, end - first)
    return Run(first, end, _taken(component.devices[0], end - first), host)


def _taken(ledger: Ledger, n: int) -> bytes:
    slots = ledger.take_private(n)
    assert slots is not None
    return slots


def back_up(tree: Tree, *nodes: Node) -> None:
    """Copy nodes to HOST, root first, and acknowledge."""
    for node in nodes:
        operation = operations.begin_backup(tree, node, operations.needs_backup(tree, node))
        assert operation is not None
        assert operations.commit(tree, operation)


def path(node: Node) -> list[Node]:
    """The nodes from below the root to `node`."""
    nodes: list[Node] = []
    above: Node | None = node
    while above is not None and above.parent is not None:
        nodes.append(above)
        above = above.parent
    return nodes[::-1]


def grown(*names: str) -> tuple[Tree, list[Node]]:
    """Two sequences that part after two pages, on both tiers; the nodes of the first."""
    tree = open_tree(*names)
    insert(tree, [1, 2, 3, 4, 5, 6, 7, 8])
    leaf = insert(tree, [1, 2, 3, 4, 9, 9])
    back_up(tree, *path(leaf))
    return tree, path(leaf)
