"""Nodes of the tree and the cells components hold on them.

Positions are pages from the start of the sequence. A cell covers its whole node or nothing: where
coverage changes, the tree splits the node, so no operation looks inside one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from kvgraft.compiled import mypyc_attr
from kvgraft.policies.policy import digest
from kvgraft.policies.recency import untrack
from kvgraft.types import PointKind

if TYPE_CHECKING:
    from kvgraft.tree.operations import Incoming, Operation

ON_DEVICE: Final = 1
ON_HOST: Final = 2
CLEAN: Final = 4
DOUBLE: Final = 8

MOST_TOGETHER: Final = 128
"""Most children in one dictionary, as a large one grows slowly; more are in `N_PARTS`."""

N_PARTS: Final = 256

KINDS: Final = (None, *PointKind)
"""Kinds of resume points by their codes in `Node.points`."""

CODES = {kind: bytes([code]) for code, kind in enumerate(KINDS) if kind is not None}


@mypyc_attr(acyclic=True)
class Cell:
    """One component's data on one node: only bytes and numbers, so it is part of no cycle.

    Attributes:
        device: slots on DEVICE, int32 bytes, or None (a tombstone there).
        host: slots on HOST, int32 bytes, or None.
        incoming: slots reserved for a transfer in flight, on the tier the cell lacks: HOST when
            `host` is None, else DEVICE.
        device_pins, host_pins: receipts holding this cell per tier, data or not.
        stamp: recency, from the tree's counter; larger is later. Negative for evict-first DEVICE
            data, left behind by a running request and not used since (I9).
        queued: queues of candidates that the cell has an entry in: `ON_DEVICE`, `ON_HOST`, `CLEAN`
            and `DOUBLE`, see `TreeComponent`.
    """

    __slots__ = ("device", "device_pins", "host", "host_pins", "incoming", "queued", "stamp")

    def __init__(self) -> None:
        self.device: bytes | None = None
        self.host: bytes | None = None
        self.incoming: Incoming | None = None
        self.device_pins = 0
        self.host_pins = 0
        self.stamp = 0
        self.queued = 0

    @property
    def is_backed(self) -> bool:
        """Whether HOST has its data, or a copy is on its way there."""
        if self.host is not None:
            return True
        return self.incoming is not None and self.incoming.to_host


@mypyc_attr(acyclic=True)
class Node:
    """An edge of whole pages and the boundary at its end.

    Attributes:
        key: tokens of the edge, int32 bytes.
        parent: None only for a root.
        children: None, a single child itself, or several by the bytes of their first page, in parts
            if they are many. Most nodes have one child: a dictionary with a copy of its page would
            double the node's size.
        start, end: pages `[start, end)` of the sequence.
        cells: one per component, in the tree's order.
        live_device, live_host: own cells with data in the tier plus children that are live there.
        operations: transfers in flight over this node, or None.
        receipts: how many receipts are anchored here; the node outlives its data for them.
        hits: times a match used this node as anchor.
        ident: creation order, for determinism and reports.
        points: the resume points on its pages: a byte for each page up to the last point, 0 or the
            code of its kind. Nearly every node has one, and the garbage collector does not follow
            bytes.
        names: its pages' names in STORAGE, the storage tier's own; None until they are needed.
            `cut` gives those of its first pages to an upper part.
        tenant: whose data it is, as an index of `TreeComponent.devices`.
    """

    __slots__ = (
        *("cells", "children", "end", "hits", "ident", "key", "live_device", "live_host", "names"),
        *("operations", "parent", "points", "receipts", "start", "tenant"),
    )

    def __init__(
        self, key: bytes, parent: Node | None, start: int, end: int, ident: int, n_cells: int = 0
    ) -> None:
        self.key = key
        self.parent = parent
        self.children: Node | dict[bytes, Node] | list[dict[bytes, Node]] | None = None
        self.start = start
        self.end = end
        cells = tuple([Cell() for _ in range(n_cells)])  # faster than a generator
        self.cells: tuple[Cell, ...] = cells
        self.live_device = 0
        self.live_host = 0
        self.operations: list[Operation] | None = None
        self.receipts = 0
        self.hits = 0
        self.ident = ident
        self.points = b""
        self.names: Any = None
        self.tenant: int = 0 if parent is None else parent.tenant
        untrack((self, cells, *cells))

    def _among(self, page: bytes) -> Node | dict[bytes, Node] | None:
        """Where the child with that first page is listed, if there is one."""
        children = self.children
        return children[digest(page) % N_PARTS] if isinstance(children, list) else children

    def child(self, page: bytes) -> Node | None:
        """The child whose first page is `page`; None if there is none."""
        among = self.children
        if isinstance(among, list):
            among = among[digest(page) % N_PARTS]
        if isinstance(among, dict):
            return among.get(page)
        return among if among is not None and among.key.startswith(page) else None

    def each_child(self) -> Iterable[Node]:
        """The children, in the same order on every rank."""
        children = self.children
        if isinstance(children, list):
            return chain.from_iterable([part.values() for part in children])
        if isinstance(children, dict):
            return children.values()
        return () if children is None else (children,)

    def list_child(self, page: bytes, child: Node) -> None:
        """List a child by its first page, replacing another one with that page."""
        children = self.children
        if isinstance(children, dict) and len(children) == MOST_TOGETHER:
            parts: list[dict[bytes, Node]] = [{} for _ in range(N_PARTS)]
            for its_page, each in children.items():
                parts[digest(its_page) % N_PARTS][its_page] = each
            untrack((parts, *parts))
            self.children = parts
        elif isinstance(children, Node) and not children.key.startswith(page):
            self.children = {children.key[: len(page)]: children}
        among = self._among(page)
        if isinstance(among, dict):
            among[page] = child
            untrack((among,))
        else:
            self.children = child

    def unlist_child(self, page: bytes) -> None:
        """Remove the child with that first page from the list."""
        children, among = self.children, self._among(page)
        if isinstance(among, dict):
            del among[page]
        if isinstance(children, dict) and len(children) == 1:
            (self.children,) = children.values()
        elif isinstance(children, Node) or (isinstance(children, list) and not any(children)):
            self.children = None

    def mark_point(self, page: int, kind: PointKind) -> bool:
        """Boundary `page`, one of the node's, is a resume point; False where it is one already."""
        at, points = page - self.start, self.points
        if at <= len(points) and points[at - 1]:
            return False
        self.points = points[: at - 1].ljust(at - 1, b"\0") + CODES[kind] + points[at:]
        return True

    def point_kinds(self) -> list[PointKind]:
        """The kinds of its resume points; no Python loop over pages."""
        codes = self.points.translate(None, b"\0")
        return [kind for code in codes if (kind := KINDS[code]) is not None]

    def each_point(self) -> Iterator[tuple[int, PointKind]]:
        """The resume points on its pages, with their boundaries, shallow first."""
        for page, code in enumerate(self.points, self.start + 1):
            kind = KINDS[code]
            if kind is not None:
                yield page, kind

    def __hash__(self) -> int:
        """By identity, as `==` is; a compiled class that has an order has no hash of its own."""
        return id(self)

    def __lt__(self, other: Node) -> bool:
        """Order among equal stamps: shallow first, then older first."""
        return self.end < other.end or (self.end == other.end and self.ident < other.ident)

    def __repr__(self) -> str:
        return f"<Node {self.ident} pages [{self.start}, {self.end})>"
