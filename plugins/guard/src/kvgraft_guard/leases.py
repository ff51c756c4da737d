"""Whether a lease's data is there and pinned (M1, M3, M7, L3, H4, R1, R5, T11).

The walk goes up from the anchor over the pages that the reaches need: O(path). It reads the cells
and shares no code with matching or pinning.
"""

from __future__ import annotations

import enum

from kvgraft.cache import Cache
from kvgraft.errors import ContractViolation
from kvgraft.requests.request import Request
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Cell, Node
from kvgraft.tree.pinning import common_pages
from kvgraft.types import Span
from kvgraft_guard.decoding import reached_from
from kvgraft_guard.paths import is_root_of

__all__ = ["Leases", "Moment"]

COMPARED_NODES = 2
"""Nodes above an anchor whose tokens are compared with the request's."""


class Moment(enum.Enum):
    """When a lease is checked, which decides where its data must be."""

    MATCHED = "just matched"
    HELD = "held"
    LOADING = "its load-back started"
    RUNNING = "its load-back delivered"


class Leases:
    """Checks the leases of one cache's requests."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.tree = cache.tree
        self._own_segments = {
            component.index
            for component, each in zip(cache.tree.components, cache.mounted)
            if each.lock_hooks is not None
        }
        self._prefix_closed = tuple(component.index for component in cache.tree.prefix_closed)
        self._homes = {
            component.index for component in cache.tree.components if component.home_is_host
        }

    def check_match(self, request: Request) -> None:
        """A match's pages are there and pinned, and are the request's own prefix.

        Raises:
            ContractViolation: M1 for other tokens or data on no tier, M3 for data that is not on
                DEVICE, T11 for another namespace's, L3 for data that is not pinned.
        """
        anchor = request.receipt.anchor
        if anchor.parent is None:
            return
        self._compare(request, anchor)
        for component in self.tree.components:
            if not component.is_prefix_closed:
                self._check_track(request, component, Moment.MATCHED)
        # The path to the root is walked for its end, and looked at on the way.
        indexes, node = self._prefix_closed, anchor
        while node.parent is not None:
            for index in indexes:
                cell = node.cells[index]
                if cell.device is None or cell.device_pins < 1 or index in self._homes:
                    self._check_cell(request, self.tree.components[index], node, Moment.MATCHED)
            node = node.parent
        namespace = request.namespace
        if not is_root_of(self.tree, node, namespace):
            raise ContractViolation(
                "T11",
                None,
                f"{_of(request)} of namespace {namespace!r} is anchored in another's tree",
            )

    def _compare(self, request: Request, anchor: Node) -> None:
        """The path ends in the request's own tokens (M1)."""
        data, page_bytes = request.key.data, self.tree.page_bytes
        node: Node | None = anchor
        for _ in range(COMPARED_NODES):
            if node is None or node.parent is None:
                return
            if not data.startswith(node.key, node.start * page_bytes):
                raise ContractViolation(
                    "M1",
                    None,
                    f"{_of(request)} is anchored below {node!r}, which holds other tokens",
                )
            node = node.parent

    def check(self, request: Request, moment: Moment) -> None:
        """A request's promised data is in its place, and pinned.

        Raises:
            ContractViolation: the rule that fits the missing data and the moment.
        """
        if request.receipt.anchor.parent is not None:
            for component in self.tree.components:
                self._check_track(request, component, moment)

    def check_loosened(self, request: Request) -> None:
        """Whole nodes that bounded reaches have passed are not pinned any longer (L7)."""
        position, receipt = reached_from(self.cache, request), request.receipt
        for component, segment in zip(self.tree.components, receipt.segments):
            if not segment or component.is_prefix_closed:
                continue
            node, reach = receipt.anchor, component.segment_at(position)
            if component.is_state:
                reach = (Span(position, position),) if node.end == position else ()
            while node.parent is not None and node.end > segment[0].start:
                held = any(low < node.end and node.start < high for low, high in segment)
                needed = any(low < node.end and node.start < high for low, high in reach)
                if (held and not needed) or (component.is_state and not reach):
                    raise ContractViolation(
                        "L7",
                        component.name,
                        f"{_of(request)} stands at page {position} and still pins {node!r} for "
                        f"{segment}; its reach needs {reach}",
                    )
                if component.is_state:
                    break
                node = node.parent

    def _check_track(self, request: Request, component: TreeComponent, moment: Moment) -> None:
        receipt = request.receipt
        segment = receipt.segments[component.index]
        if not segment:
            return
        if component.is_state:
            self._check_cell(request, component, receipt.anchor, moment)
            return
        if component.index in self._own_segments:
            # A component may pin more than its reach; that part is not checked.
            segment = common_pages(segment, component.segment_at(receipt.anchor.end))
        for low, high in segment:
            self._check_span(request, component, Span(low, high), moment)

    def _check_span(
        self, request: Request, component: TreeComponent, span: Span, moment: Moment
    ) -> None:
        node: Node | None = request.receipt.anchor
        low, high = span
        index, home_is_host = component.index, component.home_is_host
        while node is not None and node.end > low:
            if node.start < high:
                cell = node.cells[index]
                if cell.device is None or cell.device_pins < 1 or home_is_host:
                    self._check_cell(request, component, node, moment)
            node = node.parent

    def _check_cell(
        self, request: Request, component: TreeComponent, node: Node, moment: Moment
    ) -> None:
        cell = node.cells[component.index]
        if cell.device_pins < 1:
            raise ContractViolation(
                "L3",
                component.name,
                f"{_of(request)} resumes at page {request.receipt.anchor.end} and {node!r} has "
                f"{cell.device_pins} device pins",
            )
        if component.home_is_host and (cell.host is None or cell.host_pins < 1):
            raise ContractViolation(
                "H4",
                component.name,
                f"{_of(request)} runs on {node!r}, whose HOST slots are "
                f"{'gone' if cell.host is None else 'not pinned'}",
            )
        if cell.device is not None:
            return
        on_host = self._on_host(request, component, node, cell)
        if moment is Moment.RUNNING:
            raise ContractViolation(
                "R5",
                component.name,
                f"{_of(request)} runs and {node!r}, which a load-back had to bring, is not on "
                "DEVICE",
            )
        if moment is Moment.LOADING:
            if cell.incoming is None or cell.incoming.to_host:
                raise ContractViolation(
                    "R1",
                    component.name,
                    f"the load-back of {_of(request)} leaves out {node!r}",
                )
        elif moment is Moment.MATCHED:
            self._check_matched(request, component, node, held=on_host)
        elif not on_host and not _has_own_state(request, component):
            raise ContractViolation(
                "M7",
                component.name,
                f"{_of(request)} was promised {node!r} and it is on no tier it can be read from",
            )

    def _check_matched(
        self, request: Request, component: TreeComponent, node: Node, *, held: bool
    ) -> None:
        """A match names existing data: on DEVICE up to the device anchor, held on HOST behind."""
        if node.cells[component.index].host is None:
            raise ContractViolation(
                "M1",
                component.name,
                f"{_of(request)} is anchored at {request.anchor_tokens} tokens and {node!r} is on "
                "no tier",
            )
        if node.end * self.tree.page_size <= request.device_tokens:
            raise ContractViolation(
                "M3",
                component.name,
                f"{_of(request)} can resume from DEVICE up to {request.device_tokens} tokens and "
                f"{node!r} is on HOST alone",
            )
        if not held:
            raise ContractViolation(
                "M7",
                component.name,
                f"{_of(request)} is promised {node!r} from HOST, where it is not pinned",
            )

    def _on_host(self, request: Request, component: TreeComponent, node: Node, cell: Cell) -> bool:
        """Whether the request can still load the node back."""
        if component.home_is_host:
            return cell.host is not None
        host_from = request.receipt.host_from
        held = host_from is not None and node.end > host_from and cell.host_pins > 0
        return held and cell.host is not None


def _has_own_state(request: Request, component: TreeComponent) -> bool:
    """Whether it needs no other: one that it published may be evicted before it is pinned."""
    states = request.state_component(component.index)
    return states is not None and states.live is not None


def _of(request: Request) -> str:
    return f"the request of {request.prompt} tokens"
