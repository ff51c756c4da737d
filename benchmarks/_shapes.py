"""Component sets, and trees without pools, for the benchmarks below `kvgraft.Cache`."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft import Everything, Reach, StateAt, Tier, TokenKey, Trailing
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.terms import Term
from kvgraft.tree import inserting
from kvgraft.tree.component import ComponentShape
from kvgraft.tree.inserting import Holding, Run
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree

__all__ = ["bare_tree", "grow", "shapes"]


def shapes(names: Sequence[str], window: int = 4096) -> list[ComponentShape]:
    """`full`, `swa` and `mamba` as the tree sees them."""
    reaches: dict[str, Term] = {"full": Everything(), "swa": Trailing(window), "mamba": StateAt()}
    return [ComponentShape(name, Reach(reaches[name])) for name in names]


def bare_tree(names: Sequence[str], page_size: int, slots: int, window: int = 4096) -> Tree:
    """A tree with ledgers of `slots` slots per component and no tensors."""
    ledgers = {name: Ledger(name, Tier.DEVICE, SlotAllocator(slots)) for name in names}
    return Tree(page_size, shapes(names, window), ledgers, {})


def grow(tree: Tree, start: Node, key: TokenKey, end: int) -> Node:
    """Insert pages `[start.end, end)` of `key`, with a state at `end`; the node ending there.

    All components hold all pages, so that one call makes one node.
    """
    holdings = []
    first = start.end
    for component in tree.components:
        slots = component.devices[start.tenant].take_private(
            1 if component.is_state else end - first
        )
        assert slots is not None, f"{component.name}: pool too small"
        if component.is_state:
            holdings.append(Holding([], {end: slots}))
        else:
            holdings.append(Holding([Run(first, end, slots)], {}))
    inserted = inserting.insert(tree, start, key, end, holdings)
    for node in inserted.nodes:
        tree.queue_candidates(node)
    return inserted.anchor
