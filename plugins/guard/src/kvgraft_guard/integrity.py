"""Recomputing a cache's books from its tree, its pools and its requests (T1 to T9)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvgraft.admission.promises import Budget
from kvgraft.cache import Cache
from kvgraft.errors import IntegrityError
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import ADMITTED, Request
from kvgraft.requests.tables import slot_table, state_number
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import DEVICE, PoolBooks, SlotOwner
from kvgraft.tree.node import CLEAN, DOUBLE, ON_DEVICE, ON_HOST, Node
from kvgraft.tree.operations import Operation
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_retention.tenants import SharedLedger
from kvgraft_scheduling.rows import Rows

__all__ = [
    "PinOwner",
    "check_cache",
    "check_integrity",
    "check_row",
    "check_transfers",
    "overdrawn",
]


class PinOwner(NamedTuple):
    """A receipt, and who holds it.

    Attributes:
        who: the holder's name, for messages.
        on_device: whether it pins DEVICE; receipts for STORAGE pin HOST alone.
    """

    receipt: Receipt
    who: str
    on_device: bool = True


def check_integrity(
    tree: Tree,
    owners: Iterable[SlotOwner] = (),
    arriving: Iterable[SlotOwner] = (),
    held: Iterable[PinOwner] | None = None,
    operations: Iterable[Operation] | None = None,
) -> None:
    """Recompute every count, candidate and owner; O(tree).

    Args:
        tree: the tree.
        owners: slots that running requests hold privately.
        arriving: slots reserved for data from STORAGE.
        held: every receipt that is not released; None leaves pins uncounted.
        operations: every transfer between DEVICE and HOST that has not ended; None skips them.

    Raises:
        IntegrityError: naming the first rule found broken, with the numbers.
    """
    nodes = list(tree.nodes())
    private, reserved = list(owners), list(arriving)
    for root in (*tree.roots.values(), *tree.cleared):
        if root.parent is not None or root.key or root.start or root.end:
            raise IntegrityError("T1", None, f"the root is {root!r}")
        _check_live(root)
    if len(nodes) != tree.n_nodes:
        raise IntegrityError("T2", None, f"{tree.n_nodes} nodes counted, {len(nodes)} found")
    for node in nodes:
        _check_shape(tree, node)
        _check_live(node)
        _check_bases(tree, node)
        _check_pins(tree, node)
    if held is not None:
        _check_receipts(tree, nodes, list(held))
    if operations is not None:
        check_transfers(tree, nodes, list(operations))
    for component in tree.components:
        _check_candidates(tree, component, nodes)
        _check_owners(tree, component, nodes, Tier.DEVICE, private, reserved)
        if component.host is not None:
            _check_owners(tree, component, nodes, Tier.HOST, private, reserved)


def _check_shape(tree: Tree, node: Node) -> None:
    parent = node.parent
    if parent is None or parent.children is None:
        raise IntegrityError("T2", None, f"{node!r} has no parent that lists it")
    if parent.child(node.key[: tree.page_bytes]) is not node:
        raise IntegrityError("T2", None, f"{node!r} is not listed under its first page")
    pages, rest = divmod(len(node.key), tree.page_bytes)
    if rest or not pages or node.start != parent.end or node.end != node.start + pages:
        raise IntegrityError("T2", None, f"{node!r} has {len(node.key)} key bytes below {parent!r}")
    if not (
        node.live_device or node.live_host or node.children or node.operations or node.receipts
    ):
        pinned = any(cell.device_pins or cell.host_pins for cell in node.cells)
        if not pinned:
            raise IntegrityError("T3", None, f"{node!r} is dead: no data, no children, no pins")
    for component in tree.components:
        cell = node.cells[component.index]
        want = component.n_slots(node) * SLOT_BYTES
        for tier, slots in (("device", cell.device), ("host", cell.host)):
            if slots is not None and len(slots) != want:
                raise IntegrityError(
                    "T8",
                    component.name,
                    f"{node!r}: {len(slots) // SLOT_BYTES} {tier} slots "
                    f"where {want // SLOT_BYTES} belong",
                )
        if cell.incoming is not None and cell.incoming.operation not in map(
            id, node.operations or ()
        ):
            raise IntegrityError("T10", component.name, f"{node!r} lost the operation it waits for")


def _check_live(node: Node) -> None:
    children = tuple(node.each_child())
    device = sum(c.device is not None for c in node.cells) + sum(
        child.live_device > 0 for child in children
    )
    host = sum(c.host is not None for c in node.cells) + sum(
        child.live_host > 0 for child in children
    )
    if (device, host) != (node.live_device, node.live_host):
        raise IntegrityError(
            "T7",
            None,
            f"{node!r}: live counts device {node.live_device}, host {node.live_host}; "
            f"recomputed {device}, {host}",
        )


def _check_bases(tree: Tree, node: Node) -> None:
    parent = node.parent
    assert parent is not None
    for component in tree.components:
        cell = node.cells[component.index]
        if component.is_prefix_closed and parent.parent is not None:
            above = parent.cells[component.index]
            if cell.device is not None and above.device is None:
                raise IntegrityError(
                    "T5", component.name, f"{node!r} is on DEVICE, its parent is not"
                )
            closed = tree.prefix_closed_host or component.home_is_host
            if closed and cell.host is not None and above.host is None:
                raise IntegrityError(
                    "T5", component.name, f"{node!r} is on HOST, its parent is not"
                )
        if component.home_is_host and cell.device is not None and cell.host is None:
            raise IntegrityError(
                "T4", component.name, f"{node!r} has DEVICE data without its home copy"
            )
        for index in component.narrower:
            other = node.cells[index]
            hangs = component.index in tree.components[index].depends_on
            if hangs and other.device is not None and cell.device is None:
                raise IntegrityError(
                    "T4",
                    tree.components[index].name,
                    f"{node!r} is on DEVICE where {component.name!r}, of wider reach, is not",
                )
            base = (
                component is tree.components[0]
                and tree.prefix_closed_host
                and component.host is not None
            )
            if base and other.host is not None and cell.host is None:
                home = tree.components[index].home_is_host
                if not home:
                    raise IntegrityError(
                        "T4",
                        tree.components[index].name,
                        f"{node!r} is on HOST where the base is not",
                    )


def _check_pins(tree: Tree, node: Node) -> None:
    for component in tree.components:
        cell = node.cells[component.index]
        if cell.device_pins < 0 or cell.host_pins < 0:
            raise IntegrityError(
                "T6", component.name, f"{node!r}: pins {cell.device_pins}, {cell.host_pins}"
            )
        for index in component.narrower:
            if component.index in tree.components[index].narrower:
                continue
            other = node.cells[index]
            if other.device_pins > cell.device_pins or other.host_pins > cell.host_pins:
                raise IntegrityError(
                    "T6",
                    tree.components[index].name,
                    f"{node!r}: {other.device_pins} device and {other.host_pins} host pins, "
                    f"{component.name!r} has {cell.device_pins} and {cell.host_pins}",
                )


def _check_receipts(tree: Tree, nodes: list[Node], held: list[PinOwner]) -> None:
    """Pins are those of the receipts, page by page, and of nobody else (L1, L2)."""
    zeros = [0] * len(tree.components)
    device: dict[int, list[int]] = {id(node): zeros[:] for node in nodes}
    host: dict[int, list[int]] = {id(node): zeros[:] for node in nodes}
    anchored: dict[int, int] = {}
    for receipt, who, on_device in held:
        if receipt.released:
            raise IntegrityError("L2", None, f"{who} holds a receipt that was released")
        anchored[id(receipt.anchor)] = anchored.get(id(receipt.anchor), 0) + 1
        from_page = receipt.host_from
        node: Node | None = receipt.anchor
        while node is not None and node.parent is not None:
            if id(node) not in device:
                raise IntegrityError("L2", None, f"{who} is anchored at {node!r}, out of the tree")
            for component, segment in zip(tree.components, receipt.segments):
                pinned = any(low < node.end and node.start < high for low, high in segment)
                if component.is_state:
                    pinned = bool(segment) and node is receipt.anchor
                if pinned and on_device:
                    device[id(node)][component.index] += 1
                if (
                    pinned
                    and from_page is not None
                    and (component.is_state or node.end > from_page)
                ):
                    host[id(node)][component.index] += 1
            node = node.parent
    for node in nodes:
        if node.receipts != anchored.get(id(node), 0):
            raise IntegrityError(
                "L2",
                None,
                f"{node!r}: {node.receipts} receipts counted, {anchored.get(id(node), 0)} are held",
            )
        for component, cell in zip(tree.components, node.cells):
            booked = (cell.device_pins, cell.host_pins)
            wanted = (device[id(node)][component.index], host[id(node)][component.index])
            if booked != wanted:
                raise IntegrityError(
                    "L1",
                    component.name,
                    f"{node!r} has {booked} device and host pins, receipts hold {wanted}",
                )


def check_transfers(tree: Tree, nodes: Sequence[Node], operations: Sequence[Operation]) -> None:
    """Transfers and nodes name each other, and each part of a node has its share (T10, B5, L8).

    Args:
        tree: the components.
        nodes: all of the tree, or none to check only the transfers.
        operations: transfers that have not ended.

    Raises:
        IntegrityError: a node and a transfer that disagree.
    """
    known = {id(operation) for operation in operations}
    for node in nodes:
        for operation in node.operations or ():
            if id(operation) not in known or node not in operation.nodes:
                raise IntegrityError("T10", None, f"{node!r} names a transfer that is none of its")
    for operation in operations:
        for node in operation.nodes:
            if operation not in (node.operations or ()):
                raise IntegrityError("T10", None, f"{node!r} lost a transfer under way")
        for index, on_device, on_host in operation.pairs:
            cells = [node.cells[index] for node in operation.nodes]
            arriving = b"".join(
                cell.incoming.slots
                for cell in cells
                if cell.incoming is not None and cell.incoming.operation == id(operation)
            )
            if arriving != (on_host if operation.to_host else on_device):
                raise IntegrityError(
                    "B5",
                    tree.components[index].name,
                    f"a transfer brings {len(on_host) // SLOT_BYTES} slots, its "
                    f"{len(operation.nodes)} nodes wait for {len(arriving) // SLOT_BYTES}, or for "
                    "others",
                )
            if operation.receipt is None:
                continue  # the slots are its own
            source = b"".join(
                (cell.device if operation.to_host else cell.host) or b""
                for cell in cells
                if cell.incoming is not None and cell.incoming.operation == id(operation)
            )
            if source != (on_device if operation.to_host else on_host):
                raise IntegrityError(
                    "L8",
                    tree.components[index].name,
                    f"a transfer reads {len(on_device) // SLOT_BYTES} slots that its nodes no "
                    "longer hold",
                )


def _check_candidates(tree: Tree, component: TreeComponent, nodes: list[Node]) -> None:
    """Candidates are those of the definition, with their cells' stamps (T7)."""

    def on_device(node: Node) -> bool:
        reserved = node.cells[component.index].queued & CLEAN
        return not reserved and tree.is_candidate(node, component, Tier.DEVICE)

    def on_host(node: Node) -> bool:
        return tree.is_candidate(node, component, Tier.HOST)

    def is_double(node: Node) -> bool:
        cell = node.cells[component.index]
        both = cell.device is not None and cell.host is not None and not cell.queued & CLEAN
        kept = tree.prefix_closed_host or component.home_is_host or component.per_tenant_order
        return both and not kept

    for queue, flag, is_candidate in (
        (component.device.queue, ON_DEVICE, on_device),
        (component.host.queue if component.host else (), ON_HOST, on_host),
        (component.clean, CLEAN, None),
        (component.doubles, DOUBLE, is_double),
    ):
        entries = {id(node): stamp for stamp, node in queue}
        if len(entries) != len(queue):
            raise IntegrityError("T7", component.name, "a candidate is entered twice")
        for node in nodes:
            cell = node.cells[component.index]
            there = id(node) in entries
            if bool(cell.queued & flag) != there:
                raise IntegrityError(
                    "T7", component.name, f"{node!r}: queued flag and queue disagree"
                )
            if is_candidate is None:
                continue
            if is_candidate(node) and not there:
                raise IntegrityError("T7", component.name, f"{node!r} is a victim but no candidate")
            if there and flag != DOUBLE and not is_candidate(node):
                raise IntegrityError("T7", component.name, f"{node!r} is a candidate but no victim")
            if there and flag != DOUBLE and entries[id(node)] != cell.stamp:
                raise IntegrityError("T7", component.name, f"{node!r}: its entry is of another use")


def _check_free(ledger: PoolBooks, owner: dict[int, str]) -> None:
    """Free slots are nobody's, and free once; those never taken are not looked at one by one."""
    free, end = ledger.allocator.free_slots(fresh=False), ledger.allocator.end
    fresh = range(end - ledger.allocator.n_free + len(free), end)
    n_closed = sum(slot >= end for slot in owner)
    if n_closed != ledger.allocator.closing or (free and max(free) >= end):
        raise IntegrityError(
            "K7",
            ledger.component,
            f"{ledger.tier.value} pool of {end} slots: {n_closed} closed ones are owned, "
            f"{ledger.allocator.closing} counted, the largest free one is {max(free, default=-1)}",
        )
    once = set(free)
    twice = [slot for slot in (*owner, *once) if slot in fresh]
    if len(once) == len(free) and once.isdisjoint(owner) and not twice:
        return
    seen: set[int] = set()
    for slot in (*free, *twice):
        if slot in owner or slot in seen:
            who = owner.get(slot, "the free list")
            raise IntegrityError(
                "T9",
                ledger.component,
                f"{ledger.tier.value} slot {slot} belongs to {who} and the free list",
            )
        seen.add(slot)


def _check_owners(
    tree: Tree,
    component: TreeComponent,
    nodes: list[Node],
    tier: Tier,
    private: list[SlotOwner],
    arriving: list[SlotOwner],
) -> None:
    device = tier is Tier.DEVICE
    ledger = component.device if device else component.host
    assert ledger is not None
    parts = ledger.parts
    owner: dict[int, str] = {}

    def claim(slots: bytes, who: str) -> int:
        values = memoryview(slots).cast("i").tolist()
        for slot in values:
            if slot in owner:
                raise IntegrityError(
                    "T9",
                    component.name,
                    f"{tier.value} slot {slot} belongs to {owner[slot]} and {who}",
                )
            owner[slot] = who
        return len(values)

    evictable, pinned, owned, in_flight, leaving = ([0] * len(parts) for _ in range(5))
    seen: set[int] = set()
    for node in nodes:
        tenant = node.tenant
        cell = node.cells[component.index]
        slots = cell.device if device else cell.host
        if slots is not None:
            count = claim(slots, repr(node))
            if cell.device_pins if device else cell.host_pins:
                pinned[tenant] += count
            else:
                evictable[tenant] += count
        if cell.incoming is not None and cell.incoming.to_host is not device:
            in_flight[tenant] += claim(cell.incoming.slots, f"a transfer to {node!r}")
        for operation in node.operations or ():
            if device and id(operation) not in seen:
                seen.add(id(operation))
                for index, detached in operation.detached:
                    if index == component.index:
                        n_slots = claim(detached, f"a demotion of {node!r}")
                        in_flight[tenant] += n_slots
                        leaving[tenant] += n_slots
    for name, where, who, slots, tenant in private:
        if name == component.name and where is tier:
            owned[tenant] += claim(slots, who)
    for name, where, who, slots, tenant in arriving:
        if name == component.name and where is tier:
            in_flight[tenant] += claim(slots, who)
    _check_free(ledger, owner)
    for part, *recomputed in zip(parts, evictable, pinned, owned, in_flight, leaving):
        booked = [part.evictable, part.pinned, part.private, part.in_flight, part.leaving]
        if recomputed != booked:
            raise IntegrityError(
                "T8",
                component.name,
                f"{part.name} evictable, pinned, private, in flight, leaving are {booked}; "
                f"recomputed from the tree {recomputed}",
            )
    ledger.check()
    if ledger.headroom < 0:
        raise IntegrityError("A12", component.name, overdrawn(ledger))


def overdrawn(ledger: PoolBooks) -> str:
    """The numbers of a headroom below 0, for messages."""
    if not isinstance(ledger, SharedLedger):
        return (
            f"{ledger.name} promised({ledger.promised}) exceeds free({ledger.free}) + "
            f"evictable({ledger.evictable})"
        )
    parts = ", ".join(
        f"{each.tenant.name!r} committed({each.committed}) of guarantee({each.guarantee})"
        for each in ledger.parts
    )
    return f"{ledger.name} guarantees and commitments exceed capacity({ledger.capacity}): {parts}"


def check_cache(cache: Cache) -> None:
    """`Cache.check_integrity`: check all parts of a cache, one after the other."""
    requests = list(cache.requests.values())
    owners = [
        owner
        for each in requests
        for part in each.components
        for owner in part.owners(f"the request of {each.prompt} tokens", each.root.tenant)
    ]
    owners += cache.engine_slots.owners()
    operations = cache.journal.operations()
    held = [PinOwner(each.receipt, f"{each!r}") for each in (*requests, *cache.pins)]
    held += [
        PinOwner(each.receipt, "a transfer") for each in operations if each.receipt is not None
    ]
    arriving: list[SlotOwner] = []
    if cache.storage:
        cache.storage.check()
        arriving = cache.storage.owners()
        held += [PinOwner(each, "the storage tier", False) for each in cache.storage.receipts()]
    check_integrity(cache.tree, owners, arriving, held, operations)
    if cache.recorder is not None:
        cache.recorder.check()
    if cache.arenas is not None:
        cache.arenas.check()
    _check_promises(cache.budget, requests)
    _check_rows(cache.stepper.rows, requests)


def _check_promises(budget: Budget, requests: Sequence[Request]) -> None:
    """Promises and private pools are those of the requests (T8, A12)."""
    open_requests = [each for each in requests if each.stage is ADMITTED]
    for component in budget.tree.components:
        parts = [each.components[component.index] for each in open_requests]
        for ledger in component.devices:
            accounts = [part.account for part in parts if part.account.ledger is ledger]
            promised = sum([account.promised for account in accounts])
            if promised != ledger.promised:
                raise IntegrityError(
                    "A12",
                    component.name,
                    f"{ledger.name} promised({ledger.promised}) but requests hold {promised}",
                )
        for position, books in enumerate(budget.private[component.index]):
            held = sum([len(part.private[position]) // SLOT_BYTES for part in parts])
            if held != books.private:
                raise IntegrityError(
                    "T8", component.name, f"private pool: {books.private} booked, {held} held"
                )
            books.check()


def _check_rows(rows: Rows, requests: Sequence[Request]) -> None:
    """Rows are those of running requests, and say the same, but for stale ones; O(entries)."""
    owners = [each for each in rows.request if each is not None]
    if len(owners) + len(rows.free) != rows.n_rows or len(set(rows.free)) < len(rows.free):
        said = f"{len(owners)} rows taken, {len(rows.free)} free, of {rows.n_rows}"
        raise IntegrityError("T9", None, said)
    running = {id(each) for each in requests}
    for row, request in enumerate(rows.request):
        if request is None:
            continue
        if request.row != row or id(request) not in running:
            said = f"row {row} is of {request!r}, whose row is {request.row}"
            raise IntegrityError("T9", None, said)
        if row not in rows.stale:
            check_row(rows, request)


def check_row(rows: Rows, request: Request) -> None:
    """Compare one request's row of every table with it.

    Raises:
        IntegrityError: T9, a row or an entry of a table is another's.
    """
    row = request.row
    at = (int(rows.length[row]), int(rows.allocated[row]))
    is_so = (request.computed, request.allocated)
    if at != is_so:
        raise IntegrityError("T9", None, f"row {row} is at {at}, {request!r} at {is_so}")
    for component in rows.paged:
        table = rows.tables[component.index]
        assert table is not None
        slots = slot_table(request, component, DEVICE)
        if not np.array_equal(table[row, : len(slots)], slots):
            first = int(np.flatnonzero(table[row, : len(slots)] != slots)[0])
            raise IntegrityError(
                "T9",
                None,
                f"{component.name!r}: the table has slot {table[row, first]} at {first} of row "
                f"{row}, {request!r} has {slots[first]}",
            )
    for component in rows.state_components:
        part = request.state_component(component.index)
        assert part is not None
        states = rows.states[component.index][row], rows.tracked[component.index][row]
        held = state_number(part.live), state_number(part.tracked)
        if states != held:
            said = f"{component.name!r}: row {row} has states {states}, not {held}"
            raise IntegrityError("T9", None, said)
