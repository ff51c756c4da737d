"""Notifies the store of pages that are used while DEVICE or HOST serves them.

A full store evicts the least recently used data. The head of a growing conversation is served from
memory at every turn. Without notice the store would evict it and keep useless tails. So data that
requests resume from is touched: the pages that each component needs there, from the end of the
sequence to its start, so that a page is never older than one after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Span
from kvgraft_storage import Storage, StorageTicket
from kvgraft_storage.tier.naming import Asked, Naming, Together

__all__ = ["Touching"]

EVERY_S = 1.0
"""Seconds between the beginnings of two rounds; a round touches a page once."""

SHARE = 20
"""A round begins no sooner than this multiple of the last one's duration after its end."""

MOST_ANCHORS = 4096
"""Most boundaries that wait for the next round; beyond it the oldest are left out and counted."""

MOST_PAGES = 32_768
"""Most pages of one round; the least recently used are left out and counted."""

NODES_AT_ONCE = 64
"""Nodes that are visited before other work has a turn."""


class Touching:
    """Collects the pages that requests resumed from, and touches them in rounds.

    Attributes:
        counts: boundaries by outcome.
    """

    def __init__(
        self,
        tree: Tree,
        client: Storage,
        naming: Naming,
        deadline_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._tree = tree
        self._client = client
        self._naming = naming
        self._deadline_s = deadline_s
        self._clock = clock
        self._anchors: dict[Node, None] = {}
        self._round: Iterator[None] | None = None
        self._ticket: StorageTicket | None = None
        self._begun = 0.0
        self._next_at = clock() + EVERY_S

    def used(self, anchor: Node) -> None:
        """A request resumes at a boundary, or it was stored; O(1)."""
        if not self._client.touches:
            return
        self._anchors.pop(anchor, None)
        self._anchors[anchor] = None
        if len(self._anchors) > MOST_ANCHORS:
            del self._anchors[next(iter(self._anchors))]
            self.counts["left out"] += 1

    def hurry(self) -> None:
        """Begin the next round at once."""
        self._next_at = self._clock()

    @property
    def under_way(self) -> bool:
        """Whether a round is running or due."""
        if self._round is not None or self._ticket is not None:
            return True
        return bool(self._anchors) and self._client.touches and self._clock() >= self._next_at

    def stop(self) -> None:
        """Drop pages not touched yet: the store was detached or replaced."""
        self._anchors.clear()
        self._round = None
        if self._ticket is not None:
            self._ticket.cancel()

    def step(self) -> bool:
        """Continue a round, or begin one; false if there is none."""
        if self._ticket is not None:
            if not self._ticket.done:
                return False
            self._ticket = None
            now = self._clock()
            self._next_at = max(self._begun + EVERY_S, now + SHARE * (now - self._begun))
        if self._round is None:
            if not self.under_way:
                return False
            self._begun = self._clock()
            self._round = self._touch()
        if next(self._round, self) is self:
            self._round = None
        return True

    def _touch(self) -> Iterator[None]:
        """One round: from the anchor used last to the one used first, each from its root on.

        The order of that, turned around, is the order of use: in it a page comes after all pages
        that follow it in any sequence.
        """
        anchors, self._anchors = self._anchors, {}
        pieces: list[Asked] = []
        seen: set[tuple[Node, int]] = set()
        left, n_nodes = MOST_PAGES, 0
        for anchor in reversed(anchors):
            if left <= 0:
                self.counts["left out"] += 1
                continue
            path: list[Node] = []
            node: Node | None = anchor
            while node is not None and node.parent is not None:
                path.append(node)
                node = node.parent
                n_nodes += 1
                if not n_nodes % NODES_AT_ONCE:
                    yield
            if node is None or node.end:
                continue  # it left the tree
            needed = [component.needed_pages(anchor.end) for component in self._tree.components]
            root = node
            for node in reversed(path):
                parts = self._parts(node, needed, seen, left)
                if parts:
                    names = node.names
                    assert names is not None
                    namespace = self._naming.namespace(self._tree.namespace(root))
                    pieces.append(self._naming.asked(names.hashes, node.start, parts, namespace))
                    left -= sum(len(pages) for _, pages in parts)
                n_nodes += 1
                if not n_nodes % NODES_AT_ONCE:
                    yield
                if left <= 0:
                    break
            self.counts["boundaries"] += 1
        if pieces and self._client.touches:
            pieces.reverse()
            self._ticket = self._client.touch(Together(pieces), self._deadline_s)

    def _parts(
        self,
        node: Node,
        needed: Sequence[Sequence[Span]],
        seen: set[tuple[Node, int]],
        most: int,
    ) -> list[tuple[TreeComponent, npt.NDArray[np.int64]]]:
        """A node's stored pages among those that are needed, the last one first."""
        names = node.names
        if names is None or names.store != self._client.store_number:
            return []
        parts = []
        for component in reversed(self._tree.components):
            if not names.stored >> component.index & 1:
                continue
            if component.is_prefix_closed:
                if (node, component.index) in seen:
                    continue
                seen.add((node, component.index))
            for span in reversed(needed[component.index]):
                low, high = max(span.start, node.start), min(span.end, node.end)
                high = min(high, low + most)
                if low < high:
                    parts.append((component, np.arange(high - 1, low - 1, -1)))
        return parts
