"""The prefix tree: structure, data arriving and leaving, splits.

Bookkeeping only, no torch. Matching, pinning, inserting, evicting and transfers are modules beside
this one, functions over a `Tree`. Here are the changes they share, which keep ledgers, live counts
and candidates right. No component is named: everything follows from `TreeComponent.reach_pages` and
`TreeComponent.narrower`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from kvgraft.compiled import mypyc_attr
from kvgraft.errors import ConfigError, ContractViolation
from kvgraft.policies.policy import CLASS_BITS, EvictionPolicy, is_left_behind
from kvgraft.policies.recency import LeastRecentlyUsed
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.component import Cause, ComponentShape, TreeComponent, ordered
from kvgraft.tree.keys import TOKEN_BYTES
from kvgraft.tree.ledger import DEVICE, HOST, PoolBooks
from kvgraft.tree.node import ON_DEVICE, Node
from kvgraft.types import PointKind, Tier


@mypyc_attr(allow_interpreted_subclasses=True)
class TreeObserver:
    """Gets every change of nodes and data, in order; a subclass overrides the calls it needs.

    It must not change the tree; its exceptions reach the tree's caller.
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
        """Roots of cleared namespaces: their data is never matched, and freed once unheld."""

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


FURTHEST_NODES: Final = 16
"""Nodes along a line that are searched for a component's next data."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Tree:
    """One radix tree per namespace over shared pools.

    Args:
        page_size: tokens per page.
        shapes: the components, in any order.
        device: DEVICE ledger per component name.
        host: HOST ledger per component name; a component without one is never backed up.
        prefix_closed_host: whether HOST data of a node implies HOST data of its parent
            (true unless the write policy is write-back; T4, T5).

    Attributes:
        policy: that policy.
        clock: the latest stamp: the number of uses so far and, in its low bits, the class of that
            use, see `kvgraft.policies`.
        use_class: class of the uses that come next.
        use_retention: how long their data is kept; None for the default.
        lifetimes: how long data is kept (`kvgraft_retention`); None until a request asks for it.
        mirrored: components whose DEVICE data HOST can have copies of.
        tenant_of: the tenant of a namespace, as an index of `TreeComponent.devices`.
        for_tenant: the tenant whose request needs room; None outside of requests.
        observers: notified of every change, in order.
        roots: by namespace.
        cleared: roots of cleared namespaces with their namespaces, while anything below them is
            held; no match finds it.

    Raises:
        ConfigError: page size below 1, no component, or two of one name.
    """

    def __init__(
        self,
        page_size: int,
        shapes: Sequence[ComponentShape],
        device: Mapping[str, PoolBooks],
        host: Mapping[str, PoolBooks],
        *,
        prefix_closed_host: bool = True,
    ) -> None:
        self.roots: dict[object, Node] = {}
        self.cleared: dict[Node, object] = {}
        self.policy: EvictionPolicy = LeastRecentlyUsed()
        if page_size < 1:
            raise ConfigError(f"page_size {page_size} is below 1; use 1, 16 or 64")
        self.page_size = page_size
        self.page_bytes = page_size * TOKEN_BYTES
        self.prefix_closed_host = prefix_closed_host
        self.components = tuple(
            TreeComponent(self, shape, index, device[shape.name], host.get(shape.name))
            for index, shape in enumerate(ordered(shapes))
        )
        for component in self.components:
            component.narrower = tuple(
                other.index
                for other in self.components
                if other is component or component.reach.contains(other.reach)
            )
        self.by_name = {component.name: component for component in self.components}
        self.prefix_closed = tuple(
            component for component in self.components if component.is_prefix_closed
        )
        for component in self.components:
            component.depends_on = tuple(
                other.index
                for other in self.prefix_closed or self.components[:1]
                if component.index in other.narrower and other.index not in component.narrower
            )
        self.checks = tuple(
            sorted(self.components, key=lambda component: component.reach.width_tokens)
        )
        self.states = sum(
            1 << component.index for component in self.components if component.is_state
        )
        self.has_state = bool(self.states)
        self.mirrored = tuple(
            component
            for component in self.components
            if component.host is not None and not component.home_is_host
        )
        self.homes_on_host = any(component.home_is_host for component in self.components)
        self.observers: tuple[TreeObserver, ...] = ()
        self.lost_points: dict[PointKind, int] = dict.fromkeys(PointKind, 0)
        self._namespaces: dict[int, object] = {}
        self._holders: dict[int, int] = {}
        self.clock = 0
        self.use_class = 0
        self.use_retention: Any = None
        self.lifetimes: Any = None
        self.tenant_of: Callable[[object], int] = lambda namespace: 0
        self.for_tenant: int | None = None
        self.n_nodes = 0
        self.n_splits = 0
        """Nodes that were split so far."""
        self._next_ident = 0

    def __del__(self) -> None:
        """Part nodes from one another: the collector does not see the cycles that they are in."""
        stack = [*self.roots.values(), *self.cleared]
        while stack:
            node = stack.pop()
            stack.extend(node.each_child())
            node.parent = node.children = node.operations = None

    def add_observer(self, observer: TreeObserver) -> None:
        """Notify `observer` of every change from now on, after those that were added before."""
        self.observers = (*self.observers, observer)

    def remove_observer(self, observer: TreeObserver) -> None:
        """Stop notifying `observer`."""
        self.observers = tuple([each for each in self.observers if each is not observer])

    def component(self, name: Any) -> TreeComponent:
        """The books of a component.

        Raises:
            ConfigError: this cache has no such component.
        """
        try:
            return self.by_name[name]
        except (KeyError, TypeError):  # unknown, or not hashable
            names = ", ".join(self.by_name)
            raise ConfigError(f"component {name!r} is not in this cache; it has: {names}") from None

    def level(self, stamp: int) -> int:
        """The level of data with a stamp: its priority, or `EXPIRED`; 0 by default."""
        return 0 if self.lifetimes is None else int(self.lifetimes.level(stamp))

    def tick(self) -> None:
        """Another use begins: its stamp is later than all before, and carries its class."""
        self.clock = ((self.clock >> CLASS_BITS) + 1 << CLASS_BITS) + self.use_class
        if self.use_retention is not None:
            assert self.lifetimes is not None
            self.lifetimes.note(self.clock, self.use_retention)

    # -- nodes

    def new_node(self, key: bytes, parent: Node | None, start: int, end: int) -> Node:
        """A node with empty cells, not yet listed by its parent."""
        node = Node(key, parent, start, end, self._next_ident, len(self.components))
        self._next_ident += 1
        return node

    def root(self, namespace: object) -> Node:
        """The namespace's root, made at first use (T1)."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = self.new_node(b"", None, 0, 0)
            root.tenant = self.tenant_of(namespace)
            self._namespaces[root.ident] = namespace
        return root

    def namespace(self, root: Node) -> object:
        """The namespace a root is of."""
        return self._namespaces[root.ident]

    def hold_root(self, namespace: object) -> Node:
        """A request works in `namespace`: its root stays, even with nothing below it (T1)."""
        root = self.root(namespace)
        self._holders[root.ident] = self._holders.get(root.ident, 0) + 1
        return root

    def release_root(self, root: Node) -> None:
        """A holder has ended; an empty namespace without holders is forgotten."""
        left = self._holders[root.ident] - 1
        if left:
            self._holders[root.ident] = left
            return
        del self._holders[root.ident]
        if root.children is None:
            self._forget_empty(root)

    def _forget_empty(self, root: Node) -> None:
        if root.children is None and root.ident not in self._holders:
            namespace = self._namespaces.pop(root.ident)
            if root in self.cleared:
                del self.cleared[root]
            else:
                del self.roots[namespace]

    def detach_roots(self, namespaces: Sequence[object]) -> list[Node]:
        """Give namespaces an empty tree; returns their old roots, which leave once they are empty.

        No match finds data below those.
        """
        roots = [self.roots.pop(namespace) for namespace in namespaces if namespace in self.roots]
        for root in roots:
            self.cleared[root] = self._namespaces[root.ident]
        for each in self.observers if roots else ():
            each.cleared(roots)
        for root in roots:
            self._forget_empty(root)
        return roots

    def is_cleared(self, node: Node) -> bool:
        """Whether `node` is of a tree that was cleared; O(depth), O(1) where none is."""
        if not self.cleared:
            return False
        while node.parent is not None:
            node = node.parent
        return node in self.cleared

    def grow(self, key: bytes, parent: Node, start: int, end: int) -> Node:
        """A new node below `parent`, with empty cells."""
        node = self.new_node(key, parent, start, end)
        parent.list_child(key[: self.page_bytes], node)
        self.n_nodes += 1
        for each in self.observers:
            each.linked(node)
        return node

    def nodes(self, roots: Iterable[Node] | None = None) -> Iterator[Node]:
        """Every node below some roots, by default below all, parents before children."""
        stack = [*self.roots.values(), *self.cleared] if roots is None else list(roots)
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.each_child())

    def split(self, node: Node, at: int) -> Node:
        """Cut `node` before page `at`; returns the new upper part (T10, B5).

        The lower part keeps its identity, so receipts and transfers that name the node still name
        the boundary at its end. Paged cells are cut in two copies, a state stays below; pins,
        recency, hits and transfers in flight hold for both parts; no ledger changes.
        """
        #   before   parent ─ [start....at....end) node                d0 d1 d2 d3, state s
        #   after    parent ─ [start..at) upper ─ [at..end) node       d0 d1 | d2 d3, state s
        parent = node.parent
        assert parent is not None
        assert node.start < at < node.end
        self.n_splits += 1
        pages, key = at - node.start, node.key
        upper = self.new_node(key[: pages * self.page_bytes], parent, node.start, at)
        parent.list_child(key[: self.page_bytes], upper)
        node.key = key[pages * self.page_bytes :]
        node.start = at
        node.parent = upper
        self.n_nodes += 1
        upper.children = node
        upper.hits = node.hits
        if node.points:
            upper.points, node.points = node.points[:pages].rstrip(b"\0"), node.points[pages:]
        if node.names is not None:
            upper.names = node.names.cut(pages, self.states)
        if node.operations is not None:
            upper.operations = list(node.operations)
            for operation in node.operations:
                operation.nodes.insert(operation.nodes.index(node), upper)
        live_device, live_host = int(node.live_device > 0), int(node.live_host > 0)
        for component, above, below in zip(self.components, upper.cells, node.cells):
            if component.is_state:
                continue
            cut = pages * component.slots_per_page * SLOT_BYTES
            device, host = below.device, below.host
            if device is not None:
                above.device, below.device = device[:cut], device[cut:]
                live_device += 1
            if host is not None:
                above.host, below.host = host[:cut], host[cut:]
                live_host += 1
            if below.incoming is not None:
                slots = below.incoming.slots
                above.incoming = below.incoming._replace(slots=slots[:cut])
                below.incoming = below.incoming._replace(slots=slots[cut:])
            above.device_pins = below.device_pins
            above.host_pins = below.host_pins
            above.stamp = below.stamp
        upper.live_device, upper.live_host = live_device, live_host
        for each in self.observers:
            each.split(upper, node)
        self.queue_candidates(upper)
        return upper

    def prune(self, node: Node) -> None:
        """Remove `node` and its ancestors, as far as they have neither data nor children (T3)."""
        while (
            not node.live_device
            and not node.live_host
            and node.children is None
            and node.operations is None
            and not node.receipts
        ):
            parent = node.parent
            if parent is None:
                if node.ident in self._namespaces:
                    self._forget_empty(node)
                return
            queued = 0
            for cell in node.cells:
                if cell.device_pins or cell.host_pins:
                    return
                queued |= cell.queued
            parent.unlist_child(node.key[: self.page_bytes])
            node.parent = None
            self.n_nodes -= 1
            for component in self.components if queued else ():
                component.clean.withdraw(node)
                component.doubles.withdraw(node)
            for each in self.observers:
                each.removed(node)
            node = parent

    # -- data arriving on a cell

    def put(
        self,
        node: Node,
        component: TreeComponent,
        tier: Tier,
        slots: bytes,
        source: Tier | None = None,
        grown_from: int | None = None,
    ) -> None:
        """Data arrives on a tier; pinned if the cell is pinned (L4).

        Args:
            node: whose.
            component: the component that brings it.
            tier: where.
            slots: int32 bytes, owned by the caller before.
            source: the tier that it was copied from; None if it was computed.
            grown_from: the first of the pages that a leaf grew by in place, if it did.
        """
        #   live of a node = own cells with data + live children: from 0 to 1 its parent gains one
        cell = node.cells[component.index]
        if tier is DEVICE:
            ledger, n_pins = component.devices[node.tenant], cell.device_pins
            if grown_from is None:
                cell.device = slots
                node.live_device = live = node.live_device + 1
            else:
                assert cell.device is not None
                cell.device += slots
                live = 0
        else:
            ledger, n_pins = component.ledger(HOST, node.tenant), cell.host_pins
            cell.host = slots
            node.live_host = live = node.live_host + 1
        if n_pins:
            ledger.pinned += len(slots) // SLOT_BYTES
        else:
            ledger.evictable += len(slots) // SLOT_BYTES
        if cell.host is not None and cell.device is not None:
            component.queue_double(node)
        for each in self.observers:
            each.arrived(node, component, tier, grown_from or node.start, source)
        above = node.parent
        while live == 1 and above is not None:  # no leaf any more
            if tier is DEVICE:
                above.live_device = live = above.live_device + 1
            else:
                above.live_host = live = above.live_host + 1
            for leaf in self.prefix_closed:
                pool = leaf.device if tier is DEVICE else leaf.host
                if pool is not None and above.cells[leaf.index].queued:
                    pool.queue.withdraw(above)
            above = above.parent
        if tier is DEVICE and not component.is_prefix_closed and grown_from is None:
            self._enter_anew(node, component)

    def _enter_anew(self, node: Node, component: TreeComponent) -> None:
        """Losing the data before `node`'s costs less now: enter that candidate anew."""
        above = node.parent
        for _ in range(FURTHEST_NODES):
            if above is None or above.cells[component.index].device is not None:
                break
            above = above.parent
        if above is not None and above.cells[component.index].queued & ON_DEVICE:
            component.device.queue.enter_anew(above)

    def touch(self, node: Node, component: TreeComponent) -> None:
        """Data computed on DEVICE again counts as used: it is no longer evict-first, nor old."""
        was_left = is_left_behind(node.cells[component.index].stamp)
        component.restamp(node, self.clock)
        if was_left and self.is_candidate(node, component, DEVICE):
            component.device.queue.push(node)

    # -- data leaving a cell

    def drop_points(self, node: Node, component: TreeComponent) -> None:
        """A component's data left its last tier: `node` has no resume points any more."""
        if node.points and not component.is_prefix_closed:
            for kind in node.point_kinds():
                self.lost_points[kind] += 1
            node.points = b""

    def leaves(
        self, node: Node, component: TreeComponent, tier: Tier, slots: bytes, cause: Cause
    ) -> None:
        """Unpinned data will leave its cell: notify the observers, and remove it from the books."""
        for each in self.observers:
            each.leaving(node, component, tier, cause)
        on_device = tier is DEVICE
        pool = component.device if on_device else component.host
        ledger = (component.devices if on_device else component.hosts)[node.tenant]
        assert pool is not None
        assert ledger is not None
        n_slots = len(slots) // SLOT_BYTES
        ledger.evictable -= n_slots
        if self.for_tenant is not None and self.for_tenant != node.tenant:
            ledger.lost += n_slots
        pool.evicted[cause] += n_slots
        if node.cells[component.index].queued:
            pool.queue.withdraw(node)
            if on_device:
                component.clean.withdraw(node)

    def detach(self, node: Node, component: TreeComponent, tier: Tier, cause: Cause) -> bytes:
        """An unpinned cell gives up its slots on a tier; the caller owns them now."""
        cell = node.cells[component.index]
        on_device = tier is DEVICE
        slots, n_pins = cell.device, cell.device_pins
        if not on_device:
            slots, n_pins = cell.host, cell.host_pins
        assert slots is not None
        if n_pins:
            rule, said = "E1" if on_device else "E5", f"leaves {tier.name} while it is pinned"
            raise ContractViolation(rule, component.name, f"{node!r} {said}")
        self.leaves(node, component, tier, slots, cause)
        if on_device:
            cell.device = None
        else:
            cell.host = None
        self.sink(node, tier, 1)
        return slots

    def sink(self, node: Node, tier: Tier, n_cells: int) -> None:
        """`n_cells` cells of `node` lost data on a tier: keep the live counts."""
        #   live of a node = own cells with data + children that are live: at 0 its parent loses one
        below: Node | None = node
        while below is not None:
            if tier is DEVICE:
                live = below.live_device = below.live_device - n_cells
            else:
                live = below.live_host = below.live_host - n_cells
            if live:
                break
            below, n_cells = below.parent, 1
        if below is None or below is node or below.parent is None:
            return
        for component in self.prefix_closed:
            if self.is_candidate(below, component, tier):
                component.pool(tier).queue.push(below)

    def drop(self, node: Node, component: TreeComponent, tier: Tier, cause: Cause) -> None:
        """An unpinned cell's slots on a tier become free."""
        slots = self.detach(node, component, tier, cause)
        (component.device if tier is DEVICE else component.pool(HOST)).allocator.free(slots)
        cell = node.cells[component.index]
        if cell.device is None and cell.host is None:
            self.drop_points(node, component)

    # -- candidates

    def is_leaf(self, node: Node, tier: Tier) -> bool:
        """Whether no node below holds data on a tier."""
        if node.children is None:
            return True
        live = node.live_device if tier is DEVICE else node.live_host
        for cell in node.cells:
            live -= (cell.device if tier is DEVICE else cell.host) is not None
        return not live

    def is_candidate(self, node: Node, component: TreeComponent, tier: Tier) -> bool:
        """Definition of a victim for `component` on a tier (E1, T5, L5)."""
        cell = node.cells[component.index]
        if tier is DEVICE:
            if cell.device is None or cell.device_pins:
                return False
        elif cell.host is None or cell.host_pins or (component.home_is_host and cell.device_pins):
            return False
        return not component.is_prefix_closed or self.is_leaf(node, tier)

    def queue_candidates(self, node: Node) -> None:
        """Enter the cells of `node` that have become evictable."""
        if node.parent is None:
            return
        leaf = self.is_leaf(node, DEVICE)
        for component, cell in zip(self.components, node.cells):
            idle = cell.device is not None and not cell.device_pins
            if idle and (leaf or not component.is_prefix_closed):
                component.device.queue.push(node)
            host = component.host
            if host is None or cell.host is None:
                continue
            if self.is_candidate(node, component, HOST):
                host.queue.push(node)
            if cell.device is not None:
                component.queue_double(node)
