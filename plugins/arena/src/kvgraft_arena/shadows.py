"""A shadow beside each pool counts the hits that more bytes would have brought.

A shadow remembers the latest nodes that were evicted because its own pool was short, as many as
would fit into a twelfth of the budget. A request whose prompt continues from its match along
remembered nodes would have resumed deeper: these tokens are the shadow's hits. For states and
windows they are all tokens up to the boundary that it would have resumed from.

The policy `density` also remembers evicted sequences, of any pool, to learn how they come back. A
shadow remembers the victims of one pool, with their bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvgraft.policies.policy import is_left_behind
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import Request
from kvgraft.tree import matching
from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.tree.node import Cell, Node
from kvgraft.tree.tree import Tree, TreeObserver
from kvgraft.types import Tier
from kvgraft_arena.sums import PageSums

__all__ = ["SHARE", "Shadow", "Shadows"]

SHARE = 12
"""A shadow covers this part of the budget. One as small as an extent misses steps of the hit curve.
"""

SHORT: frozenset[Cause] = frozenset({"demoted", "deleted"})
"""Causes of an eviction for its own pool's shortfall."""


class _Ghost(NamedTuple):
    """A node that left.

    Attributes:
        start, end: its pages.
        nbytes: bytes of the component's slots on it.
        resumes: whether a request could have resumed at its end.
        stamp: its last use.
    """

    start: int
    end: int
    nbytes: int
    resumes: bool
    stamp: int


class Shadow:
    """The memory of one pool's victims.

    Args:
        limit_nbytes: bytes of slots that it stands for.
        slot_nbytes: bytes of one slot.

    Attributes:
        hits: tokens that requests would have found, since the count was taken last.
        horizon: last use of the latest victim: all data in the pool was used since.
    """

    def __init__(self, limit_nbytes: int, slot_nbytes: int) -> None:
        self.limit_nbytes = limit_nbytes
        self.slot_nbytes = slot_nbytes
        self.hits = 0
        self.horizon = 0
        self._ghosts: dict[int, _Ghost] = {}
        self._nbytes = 0

    def left(self, name: int, ghost: _Ghost) -> None:
        """A node was evicted; the oldest ones are forgotten."""
        self.returned(name)
        self.horizon = max(ghost.stamp, 0)
        self._ghosts[name] = ghost
        self._nbytes += ghost.nbytes
        while self._nbytes > self.limit_nbytes:
            self.returned(next(iter(self._ghosts)))

    def returned(self, name: int) -> None:
        """A node's data is there again, or forgotten."""
        ghost = self._ghosts.pop(name, None)
        if ghost is not None:
            self._nbytes -= ghost.nbytes

    def deepest(self, names: Iterable[int], boundary: int, covered: int, since: int) -> int:
        """The page at which a request would have resumed, had the nodes not left.

        Args:
            names: sums of the pages on its way, shallow first.
            boundary: the page it resumes from.
            covered: the page up to which the base component has data.
            since: a node last used before this would not be in the other pools either.
        """
        for name in names:
            ghost = self._ghosts.get(name)
            if ghost is None or ghost.start > covered:
                continue
            if ghost.end <= covered or ghost.stamp > since:
                covered = max(covered, ghost.end)
                if ghost.resumes:
                    boundary = max(boundary, ghost.end)
        return boundary


class Shadows(TreeObserver):
    """The shadows of a cache's pools.

    Args:
        tree: the tree that they watch.
        pools: the shadows by tier and the component's index.
    """

    def __init__(self, tree: Tree, pools: Mapping[tuple[Tier, int], Shadow]) -> None:
        self.tree = tree
        self.pools = pools
        self._sums = PageSums(tree.page_size)
        self._names: dict[Node, int] = {}

    def used(self, request: Request) -> None:
        """A request was matched and runs: count what it would have found."""
        size, tree = self.tree.page_size, self.tree
        limit = (request.prompt - 1) // size
        starts = {Tier.DEVICE: request.device_tokens // size}
        starts[Tier.HOST] = request.anchor_tokens // size
        tiers = {tier for tier, _ in self.pools}
        first = min(starts[tier] for tier in tiers)
        if first >= limit:
            return
        node = request.receipt.anchor
        while node.end > first:
            assert node.parent is not None
            node = node.parent
        start, data = node.end, request.key.data
        sums = self._sums.after(self._name(node), data, start, start, limit - start)
        names = sums.tolist()
        nodes = [] if node.parent is None else [node]
        path = matching.follow(tree, request.root, data, limit, nodes)
        for tier in tiers:
            boundary = starts[tier]
            covered = max(boundary, self._covered(path, start, tier))
            shadows = [shadow for (where, _), shadow in self.pools.items() if where is tier]
            for shadow in shadows:
                since = max(other.horizon for other in shadows if other is not shadow)
                deepest = shadow.deepest(names, boundary, covered, since)
                shadow.hits += (min(deepest, limit) - boundary) * size

    def _covered(self, path: matching.Path, start: int, tier: Tier) -> int:
        """The page up to which the base component has data, from page `start` on."""
        base = self.tree.components[0]
        covered = start
        for node in path.nodes:
            if node.end <= start:
                continue
            if not matching.readable(node.cells[0], base, device_only=tier is Tier.DEVICE):
                break
            covered = min(node.end, path.end)
        return covered

    # -- the tree's changes

    def linked(self, node: Node) -> None:
        self._names[node] = self._named(node)

    def split(self, upper: Node, node: Node) -> None:
        self._names[upper] = self._named(upper)

    def grew(self, node: Node) -> None:
        self._names[node] = self._named(node)

    def removed(self, node: Node) -> None:
        self._names.pop(node, None)

    def arrived(
        self, node: Node, component: TreeComponent, tier: Tier, start: int, source: Tier | None
    ) -> None:
        del start, source
        shadow = self.pools.get((tier, component.index))
        if shadow is not None:
            shadow.returned(self._names[node])

    def leaving(self, node: Node, component: TreeComponent, tier: Tier, cause: Cause) -> None:
        shadow = self.pools.get((tier, component.index))
        if shadow is None or cause not in SHORT:
            return
        slots = _slots(node.cells[component.index], tier)
        nbytes = len(slots or b"") // SLOT_BYTES * shadow.slot_nbytes
        resumes, stamp = self._resumes(node, component, tier), node.cells[component.index].stamp
        shadow.left(self._names[node], _Ghost(node.start, node.end, nbytes, resumes, stamp))

    def _resumes(self, node: Node, component: TreeComponent, tier: Tier) -> bool:
        """Whether requests could resume at the end of `node`, which `component` leaves."""
        if not component.is_prefix_closed:
            return not is_left_behind(node.cells[component.index].stamp)
        return all(_slots(cell, tier) is not None for cell in node.cells)

    def _name(self, node: Node) -> int:
        return self._sums.of_root(node.ident) if node.parent is None else self._names[node]

    def _named(self, node: Node) -> int:
        """The sum at the end of `node`."""
        assert node.parent is not None
        n_pages, before = node.end - node.start, self._name(node.parent)
        return int(self._sums.after(before, node.key, 0, node.start, n_pages)[-1])


def _slots(cell: Cell, tier: Tier) -> bytes | None:
    return cell.device if tier is Tier.DEVICE else cell.host
