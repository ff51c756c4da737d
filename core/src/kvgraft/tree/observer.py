"""The seam through which others learn of changes in the tree: the storage tier, event streams."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.compiled import mypyc_attr
from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.tree.node import Node
from kvgraft.types import Tier

__all__ = ["TreeObserver", "TreeObservers"]


@mypyc_attr(allow_interpreted_subclasses=True)
class TreeObserver:
    """Told of every change of nodes and data, in order; a subclass overrides the calls it needs.

    It changes nothing in the tree, and an exception of it reaches the tree's caller.
    """

    def linked(self, node: Node) -> None:
        """A node without data is listed by its parent."""

    def split(self, upper: Node, node: Node) -> None:
        """The first pages of `node` have become those of its new parent, `upper`."""

    def grew(self, node: Node) -> None:
        """A leaf has more pages than before; data of them arrives next."""

    def removed(self, node: Node) -> None:
        """A node without data left the tree."""

    def cleared(self, roots: Sequence[Node]) -> None:
        """Nothing below these roots is found any more; it leaves when nobody holds it."""

    def arrived(
        self,
        node: Node,
        component: TreeComponent,
        tier: Tier,
        start: int,
        source: Tier | None,
    ) -> None:
        """A component's data of the node's pages from `start` on is on a tier now.

        It was copied from the tier `source`, which may still have it; None if it was computed.
        """

    def leaving(self, node: Node, component: TreeComponent, tier: Tier, cause: Cause) -> None:
        """A component's data of a node leaves a tier; on HOST its slots are still there."""

    def matched(self, anchor: Node) -> None:
        """A request resumes at `anchor`."""


class TreeObservers(TreeObserver):
    """Several observers, each told in turn."""

    def __init__(self, observers: Sequence[TreeObserver]) -> None:
        self._observers = observers

    def linked(self, node: Node) -> None:
        for each in self._observers:
            each.linked(node)

    def split(self, upper: Node, node: Node) -> None:
        for each in self._observers:
            each.split(upper, node)

    def grew(self, node: Node) -> None:
        for each in self._observers:
            each.grew(node)

    def removed(self, node: Node) -> None:
        for each in self._observers:
            each.removed(node)

    def cleared(self, roots: Sequence[Node]) -> None:
        for each in self._observers:
            each.cleared(roots)

    def arrived(
        self,
        node: Node,
        component: TreeComponent,
        tier: Tier,
        start: int,
        source: Tier | None,
    ) -> None:
        for each in self._observers:
            each.arrived(node, component, tier, start, source)

    def leaving(self, node: Node, component: TreeComponent, tier: Tier, cause: Cause) -> None:
        for each in self._observers:
            each.leaving(node, component, tier, cause)

    def matched(self, anchor: Node) -> None:
        for each in self._observers:
            each.matched(anchor)
