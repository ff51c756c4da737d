"""Transfers as the tree sees them: reserved, then committed or aborted (B1 to B7, R1 to R7).

An operation holds its own receipt from `begin` to its acknowledgement (L8). Its reserved slots are
noted on their cells (`Cell.incoming`), so a split gives each part its share (B5).
"""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.policies.policy import is_left_behind
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.tree.eviction import drop_unreachable
from kvgraft.tree.ledger import DEVICE, HOST
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt, acquire, acquire_node, release
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier


class SlotPair(NamedTuple):
    """The same data's slots of one component, by its index: int32 `[n]` bytes on either tier."""

    component: int
    device: bytes
    host: bytes


class Incoming(NamedTuple):
    """Slots reserved on a cell.

    Attributes:
        operation: `id()` of the operation that fills them, see `operation_of`.
        to_host: whether they are on HOST.
        slots: int32 bytes.
    """

    operation: int
    to_host: bool
    slots: bytes


class Operation:
    """A copy in flight.

    It names components by their indexes: the garbage collector does not follow nodes to it, so
    nothing here may reference their tree (see `policies.recency.untrack`).

    Attributes:
        nodes: where data arrives, root first; splits add to it.
        receipt: the operation's own pins.
        pairs: source and target slots, per component.
        detached: DEVICE slots, by component, that the operation owns and frees when it ends
            (demotion).
        to_host: whether data moves to HOST.
    """

    __slots__ = ("detached", "nodes", "pairs", "receipt", "to_host")

    def __init__(self, nodes: list[Node], receipt: Receipt | None, *, to_host: bool) -> None:
        self.nodes = nodes
        self.receipt = receipt
        self.to_host = to_host
        self.pairs: list[SlotPair] = []
        self.detached: list[tuple[int, bytes]] = []

    def n_slots(self) -> int:
        """Slots moved, over all components."""
        return sum(len(pair.device) for pair in self.pairs) // SLOT_BYTES


def operation_of(node: Node, incoming: Incoming) -> Operation:
    """The operation that fills slots reserved on a cell of `node`."""
    (found,) = [each for each in node.operations or () if id(each) == incoming.operation]
    return found


def _leave(tree: Tree, operation: Operation) -> None:
    """Take the operation off its nodes and release its pins."""
    for node in operation.nodes:
        assert node.operations is not None
        node.operations.remove(operation)
        if not node.operations:
            node.operations = None
    for index, slots in operation.detached:
        ledger = tree.components[index].devices[operation.nodes[0].tenant]
        ledger.cancel(slots)
        ledger.leaving -= len(slots) // SLOT_BYTES
    operation.detached = []
    if operation.receipt is not None:
        release(tree, operation.receipt)
    for node in reversed(operation.nodes):
        if node.parent is not None:
            drop_unreachable(tree, node)
            tree.prune(node)


# -- DEVICE to HOST


def needs_backup(tree: Tree, node: Node) -> list[TreeComponent]:
    """Components whose data on `node` is on DEVICE only and can be mirrored (B7).

    Evict-first data is not worth a copy until a request uses it (I9), and cleared data never is.
    """
    if tree.cleared and tree.is_cleared(node):
        return []
    return [
        component
        for component in tree.components
        if component.host is not None
        and (cell := node.cells[component.index]).device is not None
        and cell.host is None
        and cell.incoming is None
        and not is_left_behind(cell.stamp)
    ]


def _reserve(
    wanted: list[tuple[TreeComponent, Node]], tier: Tier
) -> list[tuple[TreeComponent, Node, bytes]] | None:
    """Slots on one tier for all that is wanted, or for nothing (B2, R4).

    HOST keeps no promise for it, so only unpromised slots are taken there.
    """
    reserved: list[tuple[TreeComponent, Node, bytes]] = []
    for component, node in wanted:
        n_slots = component.n_slots(node)
        ledger = component.ledger(tier, node.tenant)
        slots = ledger.reserve(n_slots) if tier is DEVICE or n_slots <= ledger.spare else None
        if slots is None:
            _give_back(reserved, tier)
            return None
        reserved.append((component, node, slots))
    return reserved


def _give_back(reserved: list[tuple[TreeComponent, Node, bytes]], tier: Tier) -> None:
    """Give back what `_reserve` took."""
    for component, node, slots in reserved:
        component.ledger(tier, node.tenant).cancel(slots)


def _begin(operation: Operation, reserved: list[tuple[TreeComponent, Node, bytes]]) -> None:
    """Put the reserved slots on their cells, and the operation on its nodes."""
    pairs: dict[int, SlotPair] = {}
    for component, node, slots in reserved:
        index = component.index
        cell = node.cells[index]
        cell.incoming = Incoming(id(operation), operation.to_host, slots)
        source = cell.device if operation.to_host else cell.host
        assert source is not None
        device, host = (source, slots) if operation.to_host else (slots, source)
        before = pairs.get(index)
        if before is not None:
            device, host = before.device + device, before.host + host
        pairs[index] = SlotPair(index, device, host)
    operation.pairs = [pairs[index] for index in sorted(pairs)]
    for node in operation.nodes:
        if node.operations is None:
            node.operations = []
        node.operations.append(operation)


def begin_backup(tree: Tree, node: Node, components: list[TreeComponent]) -> Operation | None:
    """Reserve HOST slots for the node's components, all or none (B2).

    None if HOST is short, or if the node cannot be pinned meanwhile (A12).
    """
    reserved = _reserve([(component, node) for component in components], HOST)
    if reserved is None:
        return None
    receipt = acquire_node(tree, node, components)
    if receipt is None:
        _give_back(reserved, HOST)
        return None
    operation = Operation([node], receipt, to_host=True)
    _begin(operation, reserved)
    return operation


def begin_demotion(
    tree: Tree, node: Node, short: TreeComponent, victims: list[TreeComponent], along: Cause
) -> Operation | None:
    """Victims leave DEVICE through HOST (write-back, E4); None if HOST is short.

    Evict-first data is not copied: it is deleted, or leaves `along` with a victim of the component
    whose pool is `short`.

    The DEVICE slots belong to the operation until the copy ends, even if it fails.
    """
    unbacked = [component for component in needs_backup(tree, node) if component in victims]
    reserved = _reserve([(component, node) for component in unbacked], HOST)
    if reserved is None:
        return None
    operation = Operation([node], None, to_host=True)
    _begin(operation, reserved)
    for component in victims:
        copied = node.cells[component.index].is_backed
        cause: Cause = "demoted" if copied else "deleted" if component is short else along
        slots = tree.detach(node, component, DEVICE, cause)
        if component in unbacked:
            ledger = component.devices[node.tenant]
            ledger.in_flight += len(slots) // SLOT_BYTES
            ledger.leaving += len(slots) // SLOT_BYTES
            operation.detached.append((component.index, slots))
        else:
            component.device.allocator.free(slots)
        if not copied:
            tree.drop_points(node, component)
    return operation


# -- HOST to DEVICE


def segment_nodes(component: TreeComponent, receipt: Receipt) -> list[Node]:
    """Nodes of the receipt's path inside the component's segment, root first."""
    segment = receipt.segments[component.index]
    nodes: list[Node] = []
    if not segment:
        return nodes
    if component.is_state:
        return [receipt.anchor]
    node: Node | None = receipt.anchor
    lowest = segment[0].start
    while node is not None and node.parent is not None and node.end > lowest:
        if any(node.start < span.end and node.end > span.start for span in segment):
            nodes.append(node)
        node = node.parent
    nodes.reverse()
    return nodes


def load_plan(receipt: Receipt, components: tuple[TreeComponent, ...]) -> list[list[Node]]:
    """Per component, the nodes a load-back from the receipt's anchor fills, root first (R1).

    Data already on its way is left out (R6).
    """
    if receipt.host_from is None:
        return [[] for _ in components]
    return [
        [
            node
            for node in segment_nodes(component, receipt)
            if (cell := node.cells[component.index]).device is None
            and cell.host is not None
            and cell.incoming is None
        ]
        for component in components
    ]


def waits_for(receipt: Receipt, components: tuple[TreeComponent, ...]) -> list[Operation]:
    """Load-backs in flight that bring data this receipt's request needs (R6)."""
    found: list[Operation] = []
    if receipt.host_from is None:
        return found
    for component in components:
        for node in segment_nodes(component, receipt):
            cell = node.cells[component.index]
            if cell.device is None and cell.incoming is not None and not cell.incoming.to_host:
                operation = operation_of(node, cell.incoming)
                if operation not in found:
                    found.append(operation)
    return found


def begin_load_back(tree: Tree, receipt: Receipt) -> Operation | None:
    """Reserve DEVICE slots for everything the receipt's reach lacks, all or none (R4).

    Room has been made before (R3). Returns None, leaving no trace, if a pool is short after all.
    """
    #   free -> in_flight for every cell that lacks data; then the receipt's pages are pinned once
    #   more, for the copy. All is undone where a pool or the headroom is short (R2, R4).
    #   commit: in_flight -> pinned.      abort: in_flight -> free, and the pins go.
    plan = zip(tree.components, load_plan(receipt, tree.components))
    wanted = [(component, node) for component, nodes in plan for node in nodes]
    reserved = _reserve(wanted, DEVICE)
    if reserved is None:
        return None
    filled = sorted({id(node): node for _, node in wanted}.values(), key=lambda n: n.start)
    # The request's own segments: others would split nodes that have reserved slots.
    pins = acquire(
        tree,
        receipt.anchor,
        host_from=receipt.host_from,
        touch=False,
        segments=receipt.segments,
    )
    if pins is None:
        _give_back(reserved, DEVICE)
        return None
    operation = Operation(filled, pins, to_host=False)
    _begin(operation, reserved)
    return operation


# -- the end of an operation


def commit(tree: Tree, operation: Operation) -> bool:
    """The copy is acknowledged: publish its data; False if some could not be (B1, B3).

    A cell that has got its data elsewhere meanwhile keeps it; the copy's slots are freed.
    """
    complete = True
    for node in operation.nodes:
        gap = operation.to_host and not parent_on_host(tree, node)
        for component in tree.components:
            cell = node.cells[component.index]
            if cell.incoming is None or cell.incoming.operation != id(operation):
                continue
            slots = cell.incoming.slots
            present = cell.host if operation.to_host else cell.device
            lacks = gap or not holds_up(tree, node, component, to_host=operation.to_host)
            if present is not None or lacks:
                _cancel(tree, node, component)
                complete = complete and not lacks
                continue
            cell.incoming = None
            target, source = (HOST, DEVICE) if operation.to_host else (DEVICE, HOST)
            component.ledger(target, node.tenant).in_flight -= len(slots) // SLOT_BYTES
            tree.put(node, component, target, slots, source)
        tree.queue_candidates(node)
    _leave(tree, operation)
    return complete


def _cancel(tree: Tree, node: Node, component: TreeComponent) -> None:
    """Free the slots reserved on a cell; data that was on its way to HOST alone is lost."""
    cell = node.cells[component.index]
    assert cell.incoming is not None
    _, to_host, slots = cell.incoming
    cell.incoming = None
    component.ledger(HOST if to_host else DEVICE, node.tenant).cancel(slots)
    if cell.device is None and cell.host is None:
        tree.drop_points(node, component)


def holds_up(tree: Tree, node: Node, component: TreeComponent, *, to_host: bool) -> bool:
    """Whether `node` has the data on which a component's data there depends (T4, T5).

    It lacks that if another transfer, on which this one relied, failed.
    """
    if to_host:
        base = tree.components[0]
        return (
            not tree.prefix_closed_host
            or component.home_is_host
            or component is base
            or base.host is None
            or component.index not in base.narrower
            or node.cells[0].host is not None
        )
    parent = node.parent
    assert parent is not None
    below_a_node = component.is_prefix_closed and parent.parent is not None
    if below_a_node and parent.cells[component.index].device is None:
        return False
    return all(node.cells[index].device is not None for index in component.depends_on)


def parent_on_host(tree: Tree, node: Node, *, or_coming: bool = False) -> bool:
    """Whether the data above the node is on HOST, or on its way there (B1)."""
    parent = node.parent
    if parent is None or parent.parent is None or not tree.prefix_closed_host:
        return True
    for component in tree.prefix_closed:
        cell = parent.cells[component.index]
        missing = component.host is not None and cell.host is None
        if missing and not (or_coming and cell.is_backed):
            return False
    return True


def abort(tree: Tree, operation: Operation) -> None:
    """The copy failed or was cancelled: free the reserved slots; no other trace (R2)."""
    for node in operation.nodes:
        for component in tree.components:
            cell = node.cells[component.index]
            if cell.incoming is not None and cell.incoming.operation == id(operation):
                _cancel(tree, node, component)
    _leave(tree, operation)
