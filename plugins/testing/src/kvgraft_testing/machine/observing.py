"""A cache's content, copied into plain dictionaries keyed by token prefixes.

The only part of the model that reads the tree's nodes; it calls none of the tree's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvgraft.cache import Cache
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.types import Tier
from kvgraft_retention.settings import TenantSettings
from kvgraft_retention.tenants import TenantLedger
from kvgraft_testing.machine.brute_force import BruteForce, Gone, ModelComponent, Prefix

__all__ = ["NOBODY", "Books", "ComponentView", "NodeView", "Share", "Snapshot", "observe"]


class _Nobody(NamedTuple):
    """Stands for the namespace of an operation that is nobody's request."""


NOBODY = _Nobody()


class Books(NamedTuple):
    """One pool's ledger, in slots."""

    capacity: int
    free: int
    evictable: int
    promised: int
    closing: int = 0

    @property
    def headroom(self) -> int:
        """Slots that may be given away without breaking a promise."""
        return self.free + self.evictable - self.promised - self.closing


class Share(NamedTuple):
    """One tenant's part of a pool, in slots.

    Attributes:
        guarantee, limit: as its settings say.
        used: its slots.
        leaving: those being demoted.
        cached: those of data in the tree.
        committed: slots that its requests, pins and transfers hold, and those that are promised.
    """

    guarantee: int
    limit: int
    used: int
    leaving: int
    cached: int
    committed: int

    @property
    def over(self) -> int:
        """Slots that it has borrowed."""
        return self.used - self.leaving - self.guarantee

    @property
    def claim(self) -> int:
        """Slots that others cannot take."""
        return max(self.guarantee, self.committed - self.leaving) + self.leaving


class NodeView(NamedTuple):
    """One node: its pages, first to last, and the position of its parent among the views.

    Attributes:
        ident, hits: the node's own.
    """

    pages: tuple[Prefix, ...]
    parent: int
    ident: int = -1
    hits: int = 0


@dataclass
class ComponentView:
    """One component's data, page by page; a state by the last page before its boundary.

    Attributes:
        device, host: slots of every page present there.
        arriving: pages for which DEVICE slots are reserved.
        backing_up: pages for which HOST slots are reserved; DEVICE may have given them up already.
        device_pinned, host_pinned: pinned pages, with data or without.
        copies: which copy it is, for each page of `backing_up`.
        reserved: pages in the clean reserve, with their node's place in it.
        levels: the level of DEVICE data by the last page of its node; none while there are no
            priorities and no times to live.
    """

    device: dict[Prefix, tuple[int, ...]] = field(default_factory=dict)
    host: dict[Prefix, tuple[int, ...]] = field(default_factory=dict)
    arriving: set[Prefix] = field(default_factory=set)
    backing_up: set[Prefix] = field(default_factory=set)
    device_pinned: set[Prefix] = field(default_factory=set)
    host_pinned: set[Prefix] = field(default_factory=set)
    reserved: dict[Prefix, int] = field(default_factory=dict)
    levels: dict[Prefix, int] = field(default_factory=dict)
    copies: dict[Prefix, object] = field(default_factory=dict)


@dataclass
class Snapshot:
    """The cache between two operations.

    Attributes:
        held: per component.
        nodes: parents before children.
        books: per component and tier (`"device"`, `"host"`).
        shares: the same by tenant; empty without tenants.
        tenant: the tenant of a namespace, by its place in `shares`.
    """

    held: dict[str, ComponentView]
    nodes: list[NodeView]
    books: dict[tuple[str, str], Books]
    shares: dict[tuple[str, str], tuple[Share, ...]] = field(default_factory=dict)
    tenant: Callable[[object], int] = lambda namespace: 0

    def tenant_of(self, namespace: object) -> int:
        """The tenant of a namespace, also of one that was cleared."""
        return self.tenant(namespace.namespace if isinstance(namespace, Gone) else namespace)

    def headroom(self, name: str, tier: str, namespace: object) -> int:
        """Slots that a request of a namespace may be given without breaking a promise (A12, K4)."""
        shares, books = self.shares.get((name, tier)), self.books[name, tier]
        if not shares:
            return books.headroom
        mine = self.tenant_of(namespace)
        others = sum(each.claim for at, each in enumerate(shares) if at != mine)
        return min(books.capacity - others, shares[mine].limit) - shares[mine].committed

    def room(self, name: str, tier: str, namespace: object) -> int:
        """Slots that a request of a namespace can take without an eviction (K5)."""
        shares, free = self.shares.get((name, tier)), self.books[name, tier].free
        if not shares or namespace is NOBODY:
            return free
        mine = shares[self.tenant_of(namespace)]
        return min(free, mine.limit - mine.used)

    def may_take(self, name: str, tier: str, namespace: object, other: object) -> bool:
        """Whether data of another namespace may leave for a request's (K4)."""
        shares, owner = self.shares.get((name, tier)), self.tenant_of(other)
        return not shares or owner == self.tenant_of(namespace) or shares[owner].over > 0

    def ceiling(self, name: str, tier: str, namespace: object) -> int:
        """The most slots that requests of a namespace can have in an empty pool."""
        shares, capacity = self.shares.get((name, tier)), self.books[name, tier].capacity
        if not shares:
            return capacity
        mine = shares[self.tenant_of(namespace)]
        return min(capacity - sum(each.guarantee for each in shares) + mine.guarantee, mine.limit)

    def known(self) -> set[Prefix]:
        """Every page the tree has a node for."""
        return {page for node in self.nodes for page in node.pages}

    def on_device(self, component: ModelComponent) -> set[Prefix]:
        """Pages the component can read at once."""
        held = self.held[component.name]
        if component.home_is_host:
            return held.device.keys() & held.host.keys()
        return set(held.device)

    def cleared(self, gone: Mapping[object, Gone]) -> Snapshot:
        """The same, with the names that namespaces get when they are cleared."""

        def name(page: Prefix) -> Prefix:
            return (gone.get(page[0], page[0]), page[1])

        held = {
            each: ComponentView(
                {name(page): slots for page, slots in held.device.items()},
                {name(page): slots for page, slots in held.host.items()},
                set(map(name, held.arriving)),
                set(map(name, held.backing_up)),
                set(map(name, held.device_pinned)),
                set(map(name, held.host_pinned)),
                {name(page): place for page, place in held.reserved.items()},
                copies={name(page): copy for page, copy in held.copies.items()},
            )
            for each, held in self.held.items()
        }
        nodes = [view._replace(pages=tuple(map(name, view.pages))) for view in self.nodes]
        return Snapshot(held, nodes, self.books, self.shares, self.tenant)

    def left_over(self) -> dict[tuple[str, str], set[Prefix]]:
        """Unpinned data of cleared namespaces, by component and tier.

        A namespace with a transfer under way does not count: other data may have to wait for it.
        """
        moving = {
            page[0] for held in self.held.values() for page in (*held.arriving, *held.backing_up)
        }
        found = {}
        for name, held in self.held.items():
            for tier, cells, pinned in (
                ("device", held.device, held.device_pinned),
                ("host", held.host, held.host_pinned | held.device_pinned),
            ):
                found[name, tier] = {
                    page
                    for page in cells.keys() - pinned
                    if isinstance(page[0], Gone) and page[0] not in moving
                }
        return {where: pages for where, pages in found.items() if pages}

    def readable(self, component: ModelComponent) -> set[Prefix]:
        """Pages the component can read at once or after a load-back."""
        held = self.held[component.name]
        if component.home_is_host:
            return set(held.host)
        return held.device.keys() | held.host.keys()


def _numbers(data: bytes) -> list[int]:
    return memoryview(data).cast("i").tolist()


def _walk(cache: Cache, page_size: int) -> Iterator[tuple[Node, NodeView]]:
    count = 0
    roots = list(cache.tree.roots.items())
    roots += [(Gone(name, root.ident), root) for root, name in cache.tree.cleared.items()]
    for namespace, root in roots:
        stack: list[tuple[Node, tuple[int, ...], int]]
        stack = [(child, (), -1) for child in root.each_child()]
        while stack:
            node, before, parent = stack.pop()
            tokens = (*before, *_numbers(node.key))
            pages = tuple(
                (namespace, tokens[:end])
                for end in range(len(before) + page_size, len(tokens) + 1, page_size)
            )
            yield node, NodeView(pages, parent, node.ident, node.hits)
            stack.extend((child, tokens, count) for child in node.each_child())
            count += 1


def observe(cache: Cache, model: BruteForce) -> Snapshot:
    """Copy the state of the cache's tree and ledgers."""
    tree_components = {
        tree_component.name: tree_component for tree_component in cache.tree.components
    }
    held = {component.name: ComponentView() for component in model.components}
    nodes = []
    places = {
        component.name: {id(node): at for at, (_, node) in enumerate(component.clean)}
        for component in cache.tree.components
    }
    for node, view in _walk(cache, model.page_size):
        nodes.append(view)
        for component in model.components:
            cell = node.cells[tree_components[component.name].index]
            mine = held[component.name]
            pages = view.pages[-1:] if component.is_state else view.pages
            per_page = 1 if component.is_state else component.slots_per_page
            for slots, there in ((cell.device, mine.device), (cell.host, mine.host)):
                if slots is not None:
                    numbers = _numbers(slots)
                    for position, page in enumerate(pages):
                        there[page] = tuple(
                            numbers[position * per_page : (position + 1) * per_page]
                        )
            if cell.incoming is not None:
                to_host = cell.incoming.to_host
                (mine.backing_up if to_host else mine.arriving).update(pages)
                if to_host:
                    mine.copies.update(dict.fromkeys(pages, cell.incoming))
            if cache.tree.lifetimes is not None and cell.device is not None:
                mine.levels[view.pages[-1]] = cache.tree.level(cell.stamp)
            place = places[component.name].get(id(node))
            if place is not None:
                mine.reserved.update(dict.fromkeys(pages, place))
            if cell.device_pins:
                mine.device_pinned.update(pages)
            if cell.host_pins:
                mine.host_pinned.update(pages)
    books = {}
    for name, tree_component in tree_components.items():
        for tier, ledger in (("device", tree_component.device), ("host", tree_component.host)):
            if ledger is not None:
                closing = ledger.allocator.closing
                books[name, tier] = Books(
                    ledger.capacity, ledger.free, ledger.evictable, ledger.promised, closing
                )
    return Snapshot(held, nodes, books, _shares(cache), tenants_of(cache.config.tenants))


def tenants_of(settings: Mapping[str, TenantSettings]) -> Callable[[object], int]:
    """The tenant of a namespace, by its place: named, or by the longest beginning, or the others.

    The core knows one that is named `default`, last where the settings do not name it.
    """
    names = [*settings] if "default" in settings else [*settings, "default"]

    def tenant(namespace: object) -> int:
        begun: list[tuple[int, int]] = []
        for at, name in enumerate(names):
            each = settings.get(name, TenantSettings())
            if any(namespace == its and hash(namespace) == hash(its) for its in each.namespaces):
                return at
            if isinstance(namespace, str):
                begun += [(len(its), at) for its in each.prefixes if namespace.startswith(its)]
        return max(begun)[1] if begun else names.index("default")

    return tenant


def _shares(cache: Cache) -> dict[tuple[str, str], tuple[Share, ...]]:
    if not cache.config.tenants:
        return {}
    return {
        (component.name, tier): tuple(_share(cache, component, part) for part in ledger.parts)
        for component in cache.tree.components
        for tier, ledger in (("device", component.device), ("host", component.host))
        if ledger is not None
    }


def _share(cache: Cache, component: TreeComponent, part: Ledger) -> Share:
    assert isinstance(part, TenantLedger)
    settings = cache.config.tenants.get(part.tenant.name, TenantSettings())
    on_device = (settings.guarantee, settings.limit)
    granule = 1 if component.is_state else component.slots_per_page
    guarantee, limit = (
        int(share * part.capacity + 1e-6) // granule * granule if share < 1 else part.capacity
        for share in (on_device if part.tier is Tier.DEVICE else settings.on_host)
    )
    held = part.pinned + part.private + part.in_flight
    cached = part.evictable + part.pinned
    used, committed = held + part.evictable, held + part.promised
    return Share(guarantee, limit, used, part.leaving, cached, committed)
