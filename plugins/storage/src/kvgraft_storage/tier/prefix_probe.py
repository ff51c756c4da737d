"""Finds the pages before a tail that the store lost, before the tail is stored.

A full store evicts pages that the tree knows as stored. A tail is useless without the pages before
it, so the tier asks the store for them first. `Storing` then stores the missing ones again, from
HOST and root first, as far as the allowance goes, or leaves the tail out.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft_storage import Status, StorageTicket
from kvgraft_storage.tier.context import TierContext
from kvgraft_storage.tier.naming import Asked, Together, labels

__all__ = ["WRITTEN_OVER_OFFERED", "Allowance", "Missing", "PrefixProbe", "probe_prefix"]

WRITTEN_OVER_OFFERED = 1.25
"""Most bytes written over the bytes offered, where heads are stored again."""

NODES_AT_ONCE = 64
"""Nodes that are visited before other work has a turn."""


class Allowance:
    """Bounds the bytes that are written more than once.

    Attributes:
        offered: bytes of data to store, each counted once.
        written: bytes sent to the store, each time counted.
    """

    def __init__(self) -> None:
        self.offered = self.written = 0.0

    def covers(self, nbytes: int) -> bool:
        """Whether this many more bytes may be written, restored heads included."""
        return self.written + nbytes <= WRITTEN_OVER_OFFERED * self.offered


class Missing(NamedTuple):
    """Data of a node that the store lost.

    Attributes:
        node: the node, or the last part of it if it was split since.
        first: the page it began at.
        components: those that lost some data.
        nbytes: bytes that the store lost.
    """

    node: Node
    first: int
    components: list[TreeComponent]
    nbytes: int


class PrefixProbe(NamedTuple):
    """A lookup in the store of the pages before a tail.

    Attributes:
        ticket: of the lookup.
        end: the page the tail begins at.
        pieces: per run of addresses, the component, and the pages `[low, high)`.
    """

    ticket: StorageTicket
    end: int
    pieces: list[tuple[TreeComponent, int, int]]

    def missing(
        self, context: TierContext, parent: Node
    ) -> Generator[None, None, list[Missing] | None]:
        """Forget that the missing pages are stored; call it when the ticket is done.

        Pages without an answer count as there.

        Args:
            context: of the tier.
            parent: the node that the tail follows.

        Yields:
            Now and then, so that other work has a turn.

        Returns:
            The data to store again, root first; None if HOST lacks data that every later page
            needs.
        """
        lost: dict[int, npt.NDArray[np.bool_]] = {}
        statuses, at = self.ticket.statuses, 0
        for number, (component, low, high) in enumerate(self.pieces, 1):
            n_labels = len(labels(component))
            told = statuses[at : at + n_labels * (high - low)]
            at += len(told)
            if Status.MISS in told:
                gone = np.fromiter((each is Status.MISS for each in told), np.bool_, len(told))
                mask = lost.setdefault(component.index, np.zeros(self.end, dtype=np.bool_))
                mask[low:high] = gone.reshape(high - low, n_labels).any(axis=1)
            if not number % NODES_AT_ONCE:
                yield
        if not lost:
            return []
        path = yield from _path(parent)
        found: list[Missing] = []
        for number, node in enumerate(path, 1):
            mine, nbytes = [], 0
            for index, mask in lost.items():
                component, names = context.tree.components[index], node.names
                n_lost = int(np.count_nonzero(mask[node.start : node.end]))
                if not n_lost or names is None or names.sent >> index & 1:
                    continue
                names.stored &= ~(1 << index)
                if node.cells[index].host is not None:
                    mine.append(component)
                    nbytes += n_lost * len(labels(component)) * context.slabs.nbytes[index]
                elif component.is_prefix_closed:
                    return None
            if mine:
                found.append(Missing(node, node.start, mine, nbytes))
            if not number % NODES_AT_ONCE:
                yield
        return found


def probe_prefix(
    context: TierContext, parent: Node, boundary: int
) -> Generator[None, None, PrefixProbe | None]:
    """Look up the pages up to a node's end that its components need at a boundary.

    Data on its way to the store counts as there.

    Args:
        context: of the tier.
        parent: the node.
        boundary: a later page.

    Yields:
        Now and then, so that other work has a turn.

    Returns:
        The lookup; None if there is none to make.
    """
    path = yield from _path(parent)
    root = path[0].parent if path else None
    if root is None:
        return None
    namespace = context.naming.namespace(context.tree.namespace(root))
    needed = [component.needed_pages(boundary) for component in context.tree.components]
    asked: list[Asked] = []
    pieces: list[tuple[TreeComponent, int, int]] = []
    for number, node in enumerate(path, 1):
        names = context.naming.of(node)
        parts = []
        for component, spans in zip(context.tree.components, needed):
            if names.sent >> component.index & 1:
                continue
            for span in spans:
                low, high = max(span.start, node.start), min(span.end, node.end)
                if low < high:
                    parts.append((component, np.arange(low, high)))
                    pieces.append((component, low, high))
        if parts:
            asked.append(context.naming.asked(names.hashes, node.start, parts, namespace))
        if not number % NODES_AT_ONCE:
            yield
    if not asked:
        return None
    ticket = context.client.exists(Together(asked), context.deadline_s)
    return PrefixProbe(ticket, parent.end, pieces)


def _path(node: Node) -> Generator[None, None, list[Node]]:
    """A node and those above it, root first, without the root; none if it left the tree."""
    path: list[Node] = []
    at: Node | None = node
    while at is not None and at.parent is not None:
        path.append(at)
        at = at.parent
        if not len(path) % NODES_AT_ONCE:
            yield
    path.reverse()
    return path if at is not None and not at.end else []
