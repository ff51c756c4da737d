"""Making room (E1 to E7).

A pool needs slots. Evict-first data goes first, then the least recently used victim of that
component (I9). Inside the tree narrower components leave with it and wider ones stay; at a leaf all
data leaves. Candidates wait in queues per component and tier, see `kvgraft.tree.component`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from kvgraft.policies.policy import EvictionPolicy
from kvgraft.tree.component import LEFT, Cause, TreeComponent
from kvgraft.tree.ledger import DEVICE, HOST
from kvgraft.tree.matching import cost_of_losing
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier

LEAST_TOKENS, LEAST_SHARE = 1024, 64
"""The least tokens, or part, that a long node loses at a time: the rest is copied each time."""


class Victim(NamedTuple):
    """One node's cells chosen to leave DEVICE.

    Attributes:
        node: the node.
        component: whose pool is short.
        components: whose cells leave, including that one.
        at_leaf: whether no node below has data on DEVICE.
    """

    node: Node
    component: TreeComponent
    components: list[TreeComponent]
    at_leaf: bool


def use_policy(tree: Tree, policy: EvictionPolicy) -> None:
    """Let `policy` order the victims of every pool, component by component; the tree is empty."""
    tree.policy = policy
    for component in tree.components:
        cost = None if component.is_prefix_closed else partial(cost_of_losing, component)
        for pool in (component.device, component.host):
            if pool is not None:
                for ledger in pool.parts:
                    ledger.cost = cost
                pool.queue.use(policy.order)


def has_left_behind(tree: Tree, component: TreeComponent, tenant: int) -> bool:
    """Whether the next victim for a tenant's request is evict-first data."""
    asked, tree.for_tenant = tree.for_tenant, tenant
    try:
        return component.device.queue.next_level() == LEFT
    finally:
        tree.for_tenant = asked


def next_device_victim(tree: Tree, component: TreeComponent) -> Victim | None:
    """Take the component's next candidate off its queue; None if there is none."""
    return next_victim(tree, component, component.pop_device)


def next_victim(
    tree: Tree, component: TreeComponent, take: Callable[[], Node | None]
) -> Victim | None:
    """The next DEVICE candidate from `take` that can leave; None if there is none."""
    passed: list[Node] = []
    victim = None
    while victim is None and (node := take()) is not None:
        victim = victim_at(tree, node, component)
        if victim is None:
            passed.append(node)
    for node in passed:  # still candidates, though not for this request
        if tree.is_candidate(node, component, DEVICE):
            component.device.queue.push(node)
        component.queue_double(node)
    return victim


def victim_at(tree: Tree, node: Node, component: TreeComponent, below: int = 0) -> Victim | None:
    """The component's data on `node`, with all data that leaves DEVICE along; None if it cannot.

    Args:
        tree: the tree.
        node: where.
        component: whose pool is short.
        below: children that count as gone.
    """
    cell = node.cells[component.index]
    if cell.device is None or cell.device_pins:
        return None
    of_another = tree.for_tenant is not None and node.tenant != tree.for_tenant
    if of_another:
        _keep_guaranteed(tree, node, component, DEVICE)
    #               wider reach   the component   narrower reaches        (E3)
    #   inside        stays          leaves            leave
    #   at a leaf     leaves         leaves            leave
    held = []
    pinned = False
    for other, its in zip(tree.components, node.cells):
        if its.device is not None:
            held.append(other)
            pinned = pinned or its.device_pins > 0
    at_leaf = node.live_device == len(held) + below and not pinned
    if at_leaf and (not of_another or _all_borrowed(node, component, held, DEVICE)):
        return Victim(node, component, held, True)
    if component.is_prefix_closed:
        return None
    narrower = [other for other in held if other.index in component.narrower]
    if pinned and any(node.cells[other.index].device_pins for other in narrower):
        return None
    return Victim(node, component, narrower, False)


def still_there(victim: Victim) -> bool:
    """Whether the victim's cells survived the HOST eviction made for their copies."""
    cells = victim.node.cells
    return all(cells[component.index].device is not None for component in victim.components)


def _keep_guaranteed(tree: Tree, node: Node, component: TreeComponent, tier: Tier) -> None:
    """Cut the victim of another tenant's request: no more than was borrowed leaves (K4)."""
    _cut(tree, node, component, component.ledger(tier, node.tenant).over)


def _cut(tree: Tree, node: Node, component: TreeComponent, most: int) -> None:
    """No more than the last `most` slots of a victim leave; those before them are next in line."""
    n_slots = component.n_slots(node)
    most = max(most, n_slots // LEAST_SHARE)
    if n_slots > most:
        tree.split(node, node.end - most // component.slots_per_page)


def _all_borrowed(
    node: Node, component: TreeComponent, held: list[TreeComponent], tier: Tier
) -> bool:
    """Whether another tenant's request may take a whole leaf for one of its components (K4).

    What is contained in that one goes anyway: it is of no use alone.
    """
    for other in held:
        over = other.ledger(tier, node.tenant).over
        if other.index not in component.narrower and other.n_slots(node) > over:
            return False
    return True


def evict_victim(tree: Tree, victim: Victim) -> None:
    """Free the victim's DEVICE slots: demoted where HOST has a copy or gets one, else deleted.

    Contract: E3 E4
    """
    node = victim.node
    parent = node.parent
    assert parent is not None
    along: Cause = "leaf" if victim.at_leaf else "cascade"
    for component in victim.components:
        cell = node.cells[component.index]
        slots = cell.device
        assert slots is not None
        cause = along
        if component is victim.component:
            cause = "demoted" if cell.is_backed else "deleted"
        tree.leaves(node, component, DEVICE, slots, cause)
        cell.device = None
        component.device.allocator.free(slots)
        if node.points and not cell.is_backed:
            tree.drop_points(node, component)
    lift_recency(tree, node, parent)
    tree.sink(node, DEVICE, len(victim.components))
    if node.live_host or node.operations is not None or node.children is not None:
        drop_unreachable(tree, node)
    tree.prune(node)


def lift_recency(tree: Tree, node: Node, parent: Node) -> None:
    """A use of a node is a use of its prefix: the parent, next in line, inherits the stamp.

    This is lazy: matching touches one node, and the stamp climbs when the nodes below are gone. A
    policy with scores keeps the parent's own stamp if that scores higher.
    """
    for component in tree.prefix_closed if parent.parent is not None else ():
        stamp = node.cells[component.index].stamp
        own = parent.cells[component.index].stamp
        if stamp > own and (tree.lifetimes is not None or component.is_worth(stamp, own)):
            component.restamp(parent, stamp)


def evict_device(tree: Tree, component: TreeComponent, n_slots: int) -> int:
    """Free at least `n_slots` more DEVICE slots of one component; returns how many it freed.

    Stops as soon as the target is reached, counting slots that cascades freed: a long sequence
    loses only its end. Returns short when there is no victim left (E2, E6). Nothing is copied: see
    `kvgraft.requests.eviction` for write-back. For a tenant's request (`Tree.for_tenant`) its limit
    counts as well.
    """
    ledger = component.books_for(DEVICE, tree.for_tenant)
    before = component.device.free
    target = ledger.room + n_slots
    least = max(1, LEAST_TOKENS // tree.page_size) * component.slots_per_page
    while ledger.room < target:
        victim = next_device_victim(tree, component)
        if victim is None:
            break
        if component.is_prefix_closed:
            node, most = victim.node, max(target - ledger.room, least)
            if component.n_slots(node) > most and not node.cells[component.index].is_backed:
                _cut(tree, node, component, most)
        evict_victim(tree, victim)
    return component.device.free - before


def evict_host(tree: Tree, component: TreeComponent, n_slots: int) -> int:
    """Free at least `n_slots` more HOST slots of one component; returns how many it freed (E5)."""
    pool, ledger = component.pool(HOST), component.books_for(HOST, tree.for_tenant)
    before = ledger.free
    target = ledger.room + n_slots
    held: list[Node] = []
    while ledger.room < target and (node := component.pop_double()) is not None:
        if node.cells[component.index].host_pins:
            held.append(node)
        else:
            tree.drop(node, component, HOST, "demoted")
    for node in held:
        component.queue_double(node)
    while ledger.room < target:
        node = pool.queue.take()
        if node is None:
            break
        if tree.is_candidate(node, component, HOST):
            stamp = node.cells[component.index].stamp
            component.host_floor = pool.queue.score(stamp)
            component.host_level = tree.level(stamp)
            _evict_host_node(tree, node, component)
    return ledger.free - before


def is_admitted(tree: Tree, victim: Victim, component: TreeComponent) -> bool:
    """Whether HOST has room for a component's data of a DEVICE victim, or should make some (E4).

    It should if the data's score is no lower than that of the last victim there. Where tenants
    share the pool, one's victims say nothing about another's data.
    """
    ledger, floor, node = component.host, component.host_floor, victim.node
    assert ledger is not None
    if floor is None or component.per_tenant_order or ledger.free >= component.n_slots(node):
        return True
    stamp = node.cells[component.index].stamp
    level, score = tree.level(stamp), ledger.queue.score(stamp)
    if level != component.host_level:
        return level > component.host_level
    return score is None or score >= floor


def _evict_host_node(tree: Tree, node: Node, component: TreeComponent) -> None:
    """Free one node's HOST cells: everything at a leaf, else the component and narrower ones."""
    #                        wider   the component   narrower, but canonical copies    (E5)
    #   inside, or one held  stay    leaves          leave, all or none
    #   at a leaf            leave   leaves          leave, canonical copies too
    of_another = tree.for_tenant is not None and node.tenant != tree.for_tenant
    if of_another:
        _keep_guaranteed(tree, node, component, HOST)
    held = [other for other in tree.components if node.cells[other.index].host is not None]
    at_leaf = tree.is_leaf(node, HOST) and (
        not of_another or _all_borrowed(node, component, held, HOST)
    )
    if not at_leaf or any(not _host_idle(node, other) for other in held):
        # A canonical copy on HOST is useful while DEVICE has the wider component's data.
        held = [
            other
            for other in held
            if other.index in component.narrower and (other is component or not other.home_is_host)
        ]
        at_leaf = False
        if any(not _host_idle(node, other) for other in held):
            return
    parent = node.parent
    assert parent is not None
    for other in held:
        if other is not component:
            cause: Cause = "leaf" if at_leaf else "cascade"
        else:
            on_device = node.cells[other.index].device is not None and not other.home_is_host
            cause = "demoted" if on_device else "deleted"
        tree.drop(node, other, HOST, cause)
        if other.home_is_host:
            _lose_home(tree, node, other, cause)
    lift_recency(tree, node, parent)
    for other in tree.prefix_closed if parent.parent is not None else ():
        if tree.is_candidate(parent, other, HOST):
            other.pool(HOST).queue.push(parent)
    drop_unreachable(tree, node)
    tree.prune(node)


def _host_idle(node: Node, component: TreeComponent) -> bool:
    """Whether nothing holds the component's HOST cell."""
    cell = node.cells[component.index]
    return not cell.host_pins and not (component.home_is_host and cell.device_pins)


def _lose_home(tree: Tree, node: Node, component: TreeComponent, cause: Cause) -> None:
    """The canonical copy is gone: DEVICE data of the component and narrower ones is useless."""
    for index in component.narrower:
        other = tree.components[index]
        cell = node.cells[index]
        if cell.device is not None and not cell.device_pins:
            tree.drop(node, other, DEVICE, cause if other is component else "cascade")


def drop_unreachable(tree: Tree, node: Node) -> None:
    """Drop data that is useless once prefix-closed data is gone from `node`.

    That is: cells of narrower components on the node, and everything below it. It is unpinned by
    T6; the cost grows with the cells dropped.
    """
    #   root ── data ── node: a prefix-closed component has no data on any tier, none in flight
    #                    └── nodes below: no request can resume there
    if not tree.prefix_closed or node.parent is None:
        return
    for component in tree.prefix_closed:
        cell = node.cells[component.index]
        on_device = cell.device is not None and not component.home_is_host
        if cell.incoming is None and cell.host is None and not on_device:
            break
    else:
        return
    stack = [node]
    unreachable: list[Node] = []
    while stack:
        below = stack.pop()
        unreachable.append(below)
        stack.extend(below.each_child())
    for below in reversed(unreachable):
        for component in tree.components:
            cell = below.cells[component.index]
            if cell.device is not None and not cell.device_pins:
                tree.drop(below, component, DEVICE, "cascade")
            if cell.host is not None and not cell.host_pins:
                tree.drop(below, component, HOST, "cascade")
        if below is not node:
            tree.prune(below)
