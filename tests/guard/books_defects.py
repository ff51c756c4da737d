"""A core that evicts, moves and books wrongly."""

from __future__ import annotations

from typing import Any

from kvgraft import Direction
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.leases import Lease, Leases, LoadBacks
from kvgraft.requests.request import Request
from kvgraft.transfers import Journal
from kvgraft.tree import eviction, inserting, operations, pinning
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier

from .defect import breaks
from .scene import LONGER, PROMPT, Patch, Scene

__all__: list[str] = []

OTHER = list(range(500, 532))


# -- making room


@breaks("R3", "base")
def a_load_back_that_makes_room_it_does_not_need(put: Patch) -> None:
    start = LoadBacks.start

    def greedy(self: LoadBacks, request: Request, fence: Any) -> Any:
        component = self.tree.components[0]
        self.evictor.ensure_free(component, Tier.DEVICE, component.device.capacity, None)
        return start(self, request, fence)

    scene = Scene(host_tokens=128)
    scene.on_host_only(PROMPT)
    scene.cached(OTHER)
    put.into(scene.cache.load_backs, start=greedy)
    scene.cache.load_back(scene.admitted(LONGER))


@breaks("R3", "window")
def a_load_back_that_takes_from_another_pool(put: Patch) -> None:
    def from_the_base(tree: Tree, component: TreeComponent, n_slots: int) -> int:
        target, freed = component.device.free + n_slots, 0
        while component.device.free < target and (more := evict(tree, tree.components[0], 1)):
            freed += more
        return freed

    scene = Scene(plain=True, host_tokens=128, window_tokens=24)
    scene.on_host_only(PROMPT)
    for start in range(500, 900, 100):
        scene.cached(range(start, start + 8))
    request = scene.admitted(LONGER)
    evict = eviction.evict_device
    put.setattr(eviction, "evict_device", from_the_base)
    scene.cache.load_back(request)


@breaks("E2", "base")
def an_allocation_that_makes_room_for_more(put: Patch) -> None:
    make = Evictor.ensure_promised
    scene = Scene()
    put.into(
        scene.cache.evictor,
        ensure_promised=lambda self, component, n_slots, tenant, promised: make(
            self, component, n_slots + 1, tenant, promised
        ),
    )
    scene.cached(PROMPT)
    scene.cached(OTHER)
    scene.computed(range(900, 932))


@breaks("E2", "base")
def an_eviction_that_goes_on_when_there_is_enough(put: Patch) -> None:
    evict = eviction.evict_device

    def greedy(tree: Tree, component: TreeComponent, n_slots: int) -> int:
        freed = evict(tree, component, n_slots)
        victim = eviction.next_device_victim(tree, component)
        if victim is not None:
            eviction.evict_victim(tree, victim)
        return freed

    scene = Scene()
    scene.cached(PROMPT)
    scene.cached(OTHER)
    put.setattr(eviction, "evict_device", greedy)
    scene.cache.evict("base", 1)


@breaks("E2", "base")
def a_host_eviction_that_goes_on_when_there_is_enough(put: Patch) -> None:
    evict = eviction.evict_host

    def greedy(tree: Tree, component: TreeComponent, n_slots: int) -> int:
        assert component.host is not None
        return evict(tree, component, component.host.capacity)

    scene = Scene(host_tokens=64)
    scene.cached(PROMPT)
    scene.cached(OTHER)
    put.setattr(eviction, "evict_host", greedy)
    scene.cache.evict("base", 1, Tier.HOST)


@breaks("E2", "base")
def an_insert_that_evicts(put: Patch) -> None:
    insert = inserting.insert

    def greedy(tree: Tree, *given: Any) -> Any:
        eviction.evict_device(tree, tree.components[0], 1)
        return insert(tree, *given)

    scene = Scene()
    scene.cached(PROMPT)
    request = scene.computed(range(900, 908))
    put.setattr(inserting, "insert", greedy)
    scene.cache.finish(request)


@breaks("E6", "base")
def an_eviction_that_gives_up_early(put: Patch) -> None:
    scene = Scene()
    scene.cached(PROMPT)
    put.setattr(eviction, "evict_device", lambda tree, component, n_slots: 0)
    scene.cache.evict("base", 16)


@breaks("E6", "base")
def an_eviction_that_counts_wrongly(put: Patch) -> None:
    make = Evictor.evict
    scene = Scene()
    put.into(scene.cache.evictor, evict=lambda *given: make(*given) + 1)
    scene.cached(PROMPT)
    scene.cache.evict("base", 2)


@breaks("E6", "base")
def an_eviction_that_is_not_counted(put: Patch) -> None:
    evict = eviction.evict_victim

    def silent(tree: Tree, victim: eviction.Victim) -> None:
        counts = dict(victim.component.device.evicted)
        evict(tree, victim)
        victim.component.device.evicted.update(counts)

    scene = Scene()
    scene.cached(PROMPT)
    put.setattr(eviction, "evict_victim", silent)
    scene.cache.evict("base", 2)


@breaks("E3", "window")
def an_eviction_that_takes_the_base_along(put: Patch) -> None:
    choose = eviction.next_device_victim

    def everything(tree: Tree, component: TreeComponent) -> eviction.Victim | None:
        victim = choose(tree, component)
        if victim is None:
            return None
        held = [t for t in tree.components if victim.node.cells[t.index].device is not None]
        victim.components[:] = held
        return victim

    scene = Scene()
    scene.cached(PROMPT)
    scene.cached(LONGER)
    put.setattr(eviction, "next_device_victim", everything)
    scene.cache.evict("window", 1)


@breaks("E1", "base")
def an_eviction_that_ignores_pins(put: Patch) -> None:
    choose = eviction.next_device_victim

    def careless(tree: Tree, component: TreeComponent) -> eviction.Victim | None:
        for node in tree.nodes():
            cell = node.cells[component.index]
            if cell.device is not None and cell.device_pins:
                cell.device_pins = 0
                slots = len(cell.device) // SLOT_BYTES
                component.devices[node.tenant].pinned -= slots
                component.devices[node.tenant].evictable += slots
                return eviction.Victim(node, component, [component], False)
        return choose(tree, component)

    scene = Scene()
    scene.cached(PROMPT)
    scene.begin(LONGER)
    put.setattr(eviction, "next_device_victim", careless)
    scene.cache.evict("base", 16)


@breaks("L5", "base")
def an_eviction_that_takes_what_is_in_flight(put: Patch) -> None:
    evict = eviction.evict_device

    def careless(tree: Tree, component: TreeComponent, n_slots: int) -> int:
        for node in tree.nodes():
            cell = node.cells[component.index]
            if cell.incoming is not None:
                component.devices[node.tenant].cancel(cell.incoming.slots)
                cell.incoming = None
        return evict(tree, component, n_slots)

    scene = Scene(host_tokens=128)
    scene.on_host_only(PROMPT)
    scene.cached(OTHER[:8])
    scene.cache.load_back(scene.admitted(LONGER))
    put.setattr(eviction, "evict_device", careless)
    scene.cache.evict("base", 1)


@breaks("E5", "base")
def a_host_eviction_that_takes_device_data(put: Patch) -> None:
    evict = eviction._evict_host_node

    def careless(tree: Tree, node: Node, component: TreeComponent) -> None:
        evict(tree, node, component)
        tree.drop(node, component, Tier.DEVICE, "cascade")

    scene = Scene(host_tokens=64)
    scene.cached(PROMPT)
    put.setattr(eviction, "_evict_host_node", careless)
    scene.cache.evict("base", 16, Tier.HOST)


# -- transfers


@breaks("B3")
def a_backup_acknowledged_before_it_ran(put: Patch) -> None:
    def hasty(self: Journal) -> int:
        queue = self.queues[Direction.BACKUP]
        while queue:
            self.acknowledge(queue.popleft())
        return 0

    scene = Scene(host_tokens=64)
    scene.cache.finish(scene.computed(PROMPT))
    put.into(scene.cache.journal, poll=hasty)
    scene.cache.poll()


@breaks("L8", "base")
def a_backup_without_pins_of_its_own(put: Patch) -> None:
    begin = operations.begin_backup

    def loose(
        tree: Tree, node: Node, components: list[TreeComponent]
    ) -> operations.Operation | None:
        operation = begin(tree, node, components)
        if operation is not None and operation.receipt is not None:
            pinning.release(tree, operation.receipt)
            operation.receipt = None
        return operation

    put.setattr(operations, "begin_backup", loose)
    Scene(host_tokens=64).cached(PROMPT)


@breaks("L8")
def a_load_back_that_leaves_its_source_to_its_request(put: Patch) -> None:
    begin = operations.begin_load_back

    def loose(tree: Tree, receipt: Receipt) -> operations.Operation | None:
        operation = begin(tree, receipt)
        if operation is not None and operation.receipt is not None:
            pinning.release_host(tree, operation.receipt)
        return operation

    scene = Scene(plain=True, host_tokens=64)
    scene.on_host_only(PROMPT)
    put.setattr(operations, "begin_load_back", loose)
    scene.cache.load_back(scene.admitted(LONGER))


@breaks("B2", "window")
def a_backup_without_the_window(put: Patch) -> None:
    needs = operations.needs_backup
    put.setattr(operations, "needs_backup", lambda tree, node: needs(tree, node)[:1])
    Scene(host_tokens=64).cached(PROMPT)


@breaks("B1", "base")
def a_backup_below_a_gap(put: Patch) -> None:
    put.setattr(operations, "parent_on_host", lambda *given, **named: True)
    scene = Scene(host_tokens=64)
    request = scene.loaded(PROMPT, chunk=16)
    while request.computed < request.prompt:
        n_tokens = scene.cache.next_chunk(request)
        scene.cache.allocate(request, n_tokens)
        scene.cache.computed(request, n_tokens)
        scene.cache.checkpoint(request)
    assert len(scene.engine.pending) > 1
    scene.engine.fail()
    scene.settle()


@breaks("R2")
def a_drain_that_ends_before_the_transfers(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    put.into(scene.cache.journal, drain=lambda self, timeout_s: True)
    scene.cache.finish(scene.computed(PROMPT))
    scene.cache.drain()


@breaks("R2", "base")
def a_failed_transfer_that_keeps_its_slots(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.cache.finish(scene.computed(PROMPT))
    while scene.engine.pending:
        scene.engine.fail()

    def forgetful(tree: Tree, operation: operations.Operation) -> None:
        operations._leave(tree, operation)

    put.setattr(operations, "abort", forgetful)
    scene.cache.poll()


# -- books


@breaks("T8", "base")
def slots_freed_without_booking_them(put: Patch) -> None:
    scene = Scene()
    request = scene.computed(PROMPT)
    put.setattr(Ledger, "give_private", lambda self, slots: self.allocator.free(slots))
    scene.cache.abort(request)


@breaks("I2", "base")
def an_insert_that_frees_what_the_tree_owns(put: Patch) -> None:
    insert = inserting.insert

    def careless(tree: Tree, *given: Any) -> Any:
        for node in tree.nodes():
            component = tree.components[0]
            if node.cells[0].device is not None and not node.cells[0].device_pins:
                slots = tree.detach(node, component, Tier.DEVICE, "deleted")
                component.device.evicted["deleted"] -= len(slots) // SLOT_BYTES
                component.device.allocator.free(slots)
        return insert(tree, *given)

    scene = Scene()
    scene.cached(PROMPT)
    request = scene.computed(OTHER[:12])
    put.setattr(inserting, "insert", careless)
    scene.cache.finish(request)


@breaks("B3", "base")
def data_that_arrives_without_a_transfer(put: Patch) -> None:
    scene = Scene(host_tokens=64)
    scene.on_host_only(PROMPT)
    lease = Leases.lease

    def hasty(self: Leases, key: TokenKey, limit: int) -> Lease:
        for node in self.tree.nodes():
            component = self.tree.components[0]
            slots = component.device.allocator.allocate(component.n_slots(node))
            assert slots is not None
            self.tree.put(node, component, Tier.DEVICE, slots)
        return lease(self, key, limit)

    put.into(scene.cache.leases, lease=hasty)
    scene.begin([5, 5, 5, 5, 5])


@breaks("T9", "base")
def a_drain_that_frees_a_running_requests_slots(put: Patch) -> None:
    scene = Scene()
    request = scene.computed(PROMPT)
    drain = Journal.drain

    def careless(self: Journal, timeout_s: float) -> bool:
        self.tree.components[0].devices[0].give_private(request.components[0].runs[0].device)
        return drain(self, timeout_s)

    put.into(scene.cache.journal, drain=careless)
    scene.cache.drain()


@breaks("A12", "base")
def an_eviction_that_changes_a_promise(put: Patch) -> None:
    scene = Scene()
    scene.admitted(PROMPT)
    make = Evictor.evict

    def careless(self: Evictor, component: TreeComponent, *rest: Any) -> int:
        component.devices[0].promised -= 1
        return make(self, component, *rest)

    put.into(scene.cache.evictor, evict=careless)
    scene.cache.evict("base", 1)


# -- defects that only recomputing all books finds


def looked_through() -> Scene:
    """Two nodes, one below the other, and every book recomputed after each operation."""
    scene = Scene(host_tokens=64, full_check=1)
    scene.cached(PROMPT)
    scene.cached(LONGER)
    return scene


@breaks("T8", "base")
def a_slot_on_its_way_out_that_no_demotion_holds(put: Patch) -> None:
    scene = looked_through()
    put.setattr(scene.cache.tree.components[0].devices[0], "leaving", 1)
    scene.cache.drain()


@breaks("T1")
def a_root_that_has_pages(put: Patch) -> None:
    scene = looked_through()
    put.setattr(scene.cache.tree.roots[None], "end", 1)
    scene.cache.drain()


@breaks("T2")
def a_node_that_nobody_counts(put: Patch) -> None:
    scene = looked_through()
    put.setattr(scene.cache.tree, "n_nodes", 1)
    scene.cache.drain()


@breaks("T3")
def a_node_that_holds_nothing(put: Patch) -> None:
    scene = Scene(full_check=1)
    scene.cached(PROMPT[:6])
    (node,) = scene.nodes
    for cell in node.cells:
        put.setattr(cell, "device", None)
    put.setattr(node, "live_device", 0)
    put.setattr(scene.cache.tree.roots[None], "live_device", 0)
    scene.cache.drain()


@breaks("T4", "window")
def a_window_where_the_base_is_gone(put: Patch) -> None:
    scene = looked_through()
    put.setattr(scene.nodes[-1].cells[0], "device", None)
    put.setattr(scene.nodes[-1], "live_device", 1)
    scene.cache.drain()


@breaks("T5", "base")
def a_child_below_a_gap(put: Patch) -> None:
    scene = looked_through()
    for cell in scene.nodes[0].cells:
        put.setattr(cell, "device", None)
    put.setattr(scene.nodes[0], "live_device", 1)
    scene.cache.drain()


@breaks("T6", "base")
def a_pin_below_nothing(put: Patch) -> None:
    scene = looked_through()
    put.setattr(scene.nodes[-1].cells[0], "host_pins", -1)
    scene.cache.drain()


@breaks("T7")
def live_data_counted_wrongly(put: Patch) -> None:
    scene = looked_through()
    put.setattr(scene.nodes[-1], "live_device", 5)
    scene.cache.drain()


@breaks("T9", "base")
def a_slot_with_two_owners(put: Patch) -> None:
    scene = looked_through()
    upper = scene.nodes[0].cells[0].device
    assert upper is not None
    put.setattr(scene.nodes[-1].cells[0], "device", upper[:8])
    scene.cache.drain()


@breaks("T10", "base")
def a_node_that_lost_its_transfer(put: Patch) -> None:
    scene = Scene(host_tokens=64, full_check=1)
    scene.cache.finish(scene.computed(PROMPT))
    put.setattr(scene.nodes[-1], "operations", None)
    scene.cache.drain()
