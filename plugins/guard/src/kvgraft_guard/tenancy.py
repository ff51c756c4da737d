"""Checks of tenants: which one loses data for which, and how much each may hold (K4, K5, A12).

It computes from the terms of the tenants' ledgers, not from their headroom or their choice of
victims.
"""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.errors import ContractViolation
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_retention.tenants import TenantLedger

__all__ = ["Tenancy", "most_for", "room_for"]


def room_for(ledger: Ledger, mine: int = 0) -> int:
    """Slots that may be promised out of a tenant's ledger, or a pool's, `mine` among them."""
    if not isinstance(ledger, TenantLedger):
        kept = ledger.promised + ledger.allocator.closing
        return ledger.free + ledger.evictable - kept + mine
    taken = 0
    for other in ledger.pool.parts:
        if other is not ledger:
            taken += _claim(other)
    return min(ledger.capacity - taken, ledger.limit) - _committed(ledger) + mine


def most_for(ledger: Ledger) -> int:
    """The most slots that a tenant's requests can have in an empty pool."""
    if not isinstance(ledger, TenantLedger):
        return ledger.capacity
    kept = sum([each.guarantee for each in ledger.pool.parts if each is not ledger])
    return min(ledger.capacity - kept, ledger.limit)


def _committed(ledger: TenantLedger) -> int:
    return ledger.pinned + ledger.private + ledger.in_flight + ledger.promised


def _claim(ledger: TenantLedger) -> int:
    """Slots that others' promises leave to a tenant; those on their way out are beside all else."""
    return max(ledger.guarantee, _committed(ledger) - ledger.leaving) + ledger.leaving


def _check_told(ledger: TenantLedger, name: str) -> None:
    """The numbers that decisions go by are those of the books."""
    kept = _kept(ledger)
    told = ledger.headroom, ledger.over, ledger.room, ledger.ceiling
    is_so = (
        room_for(ledger),
        kept - ledger.guarantee,
        min(ledger.allocator.n_free, ledger.limit - kept - ledger.leaving),
        most_for(ledger),
    )
    if told != is_so:
        others = sum([_claim(each) for each in ledger.pool.parts if each is not ledger])
        of_others = (
            ledger.headroom > ledger.capacity - others - _committed(ledger)
            or ledger.over != kept - ledger.guarantee
            or ledger.ceiling > most_for(ledger)
        )
        raise ContractViolation(
            "K4" if of_others else "K5",
            ledger.component,
            f"{ledger.tier.value}: tenant {ledger.tenant.name!r} has headroom, borrowed, room and "
            f"most slots {told} after {name}; by its books it is {is_so}",
        )


def _kept(ledger: TenantLedger) -> int:
    """Slots a tenant has, and keeps."""
    return ledger.evictable + ledger.pinned + ledger.private + ledger.in_flight - ledger.leaving


class _Room(NamedTuple):
    """Room that is being made.

    Attributes:
        component: whose pool is short.
        ledgers: that pool's, by tenant.
        for_tenant: the tenant it is for; None for nobody.
        kept: what every tenant has, by component: those that may not lose it.
        on_device: on which tier.
    """

    component: TreeComponent
    ledgers: tuple[TenantLedger, ...]
    for_tenant: int | None
    kept: dict[int, list[int]]
    on_device: bool


class Tenancy:
    """Checks evictions in pools that tenants share.

    Attributes:
        shared: whether tenants share any pool.
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.shared = len(tree.components[0].devices) > 1
        self._room: _Room | None = None
        self._over: list[int] = []

    def _ledgers(self, component: TreeComponent, *, on_device: bool) -> tuple[TenantLedger, ...]:
        ledgers = component.devices if on_device else component.hosts
        return tuple([each for each in ledgers if isinstance(each, TenantLedger)])

    def begin(self, component: TreeComponent, for_tenant: int | None, *, on_device: bool) -> object:
        """Room is being made for a tenant; returns the enclosing one, for `end`."""
        before = self._room
        if self.shared:
            ledgers = self._ledgers(component, on_device=on_device)
            kept = {
                other.index: [_kept(each) for each in self._ledgers(other, on_device=on_device)]
                for other in self.tree.components
                if other is component or other.index not in component.narrower
            }
            self._room = _Room(component, ledgers, for_tenant, kept, on_device)
            self._over = [_kept(each) - each.guarantee for each in ledgers]
        return before

    def victim(self, node: Node) -> None:
        """A victim of the short pool leaves; its tenant is the one that borrowed most (K4, K5)."""
        room = self._room
        if room is None:
            return
        if not room.on_device:  # it is reported before it has left
            self._over = [_kept(each) - each.guarantee for each in room.ledgers]
        over, ledgers = self._over, room.ledgers
        if room.for_tenant not in (None, node.tenant) and over[node.tenant] <= 0:
            raise ContractViolation(
                "K4",
                room.component.name,
                f"{node!r} of tenant {ledgers[node.tenant].tenant.name!r}, which has "
                f"{over[node.tenant]} slots beyond its guarantee, is evicted for another's request",
            )
        ranks = [each / ledger.tenant.weight for each, ledger in zip(over, ledgers)]
        for at, ledger in enumerate(ledgers):
            if at != node.tenant and ledger.evictable and room.for_tenant is not None:
                borrowed = over[at] > 0 and not self._at_limit(room)
                if (borrowed or at == room.for_tenant) and ranks[at] > ranks[node.tenant]:
                    if not self._has_candidate(room, at):
                        continue
                    raise ContractViolation(
                        "K5",
                        room.component.name,
                        f"{node!r} of tenant {ledgers[node.tenant].tenant.name!r}, which has "
                        f"{over[node.tenant]} slots beyond its guarantee, is evicted before data "
                        f"of {ledger.tenant.name!r}, which has {over[at]}",
                    )
        self._over = [_kept(each) - each.guarantee for each in ledgers]

    def _at_limit(self, room: _Room) -> bool:
        assert room.for_tenant is not None
        own = room.ledgers[room.for_tenant]
        return own.limit - _kept(own) <= own.free

    def _has_candidate(self, room: _Room, tenant: int) -> bool:
        """Whether data of a tenant could go: some is held by pins of data that would go along."""
        component = room.component
        tier = Tier.DEVICE if room.on_device else Tier.HOST
        return any(
            node.tenant == tenant
            and self.tree.is_candidate(node, component, tier)
            and not any(self._is_held(node, at, room) for at in component.narrower)
            for node in self.tree.nodes()
        )

    def _is_held(self, node: Node, index: int, room: _Room) -> bool:
        cell = node.cells[index]
        if room.on_device:
            return cell.device is not None and cell.device_pins > 0
        home = self.tree.components[index].home_is_host
        return cell.host is not None and (cell.host_pins > 0 or (home and cell.device_pins > 0))

    def end(self, before: object, *, made: bool) -> None:
        """Room was made or not: no tenant lost guaranteed slots (K4), and enough was tried.

        Raises:
            ContractViolation: K4; or E6 if more data could have been evicted.
        """
        room, self._room = self._room, None
        if isinstance(before, _Room):
            self._room = before
            self._over = [_kept(each) - each.guarantee for each in before.ledgers]
        if room is None or room.for_tenant is None:
            return
        for other in self.tree.components:
            was = room.kept.get(other.index)
            now = self._ledgers(other, on_device=room.on_device)
            for at, ledger in enumerate(now if was is not None else ()):
                assert was is not None
                if at != room.for_tenant and _kept(ledger) < min(was[at], ledger.guarantee):
                    raise ContractViolation(
                        "K4",
                        other.name,
                        f"tenant {ledger.tenant.name!r} went from {was[at]} to {_kept(ledger)} "
                        f"{ledger.tier.value} slots, below its guarantee of {ledger.guarantee}, "
                        f"for a request of {room.ledgers[room.for_tenant].tenant.name!r}",
                    )
        own = room.ledgers[room.for_tenant]
        left = own.evictable
        if not self._at_limit(room):
            left += sum(
                [
                    max(0, min(each.evictable, _kept(each) - each.guarantee))
                    for each in room.ledgers
                    if each is not own
                ]
            )
        if room.on_device and not made and left:
            raise ContractViolation(
                "E6",
                room.component.name,
                f"making room for tenant {own.tenant.name!r} stopped with {own.free} slots free "
                f"and {left} left that it could have",
            )

    def check_standing(self, name: str) -> None:
        """After an operation: no tenant is beyond its limit, no guarantee is given away (A12)."""
        if not self.shared:
            return
        for component in self.tree.components:
            for on_device in (True, False):
                ledgers = self._ledgers(component, on_device=on_device)
                taken = 0
                for each in ledgers:
                    taken += _claim(each)
                    if _kept(each) + each.leaving > each.limit:
                        raise ContractViolation(
                            "K5",
                            component.name,
                            f"tenant {each.tenant.name!r} has {_kept(each) + each.leaving} "
                            f"{each.tier.value} slots after {name}, its limit is {each.limit}",
                        )
                if ledgers and taken > ledgers[0].capacity:
                    raise ContractViolation(
                        "A12",
                        component.name,
                        f"guarantees, and what requests hold and are promised beyond them, are "
                        f"{taken} {ledgers[0].tier.value} slots after {name}; the pool has "
                        f"{ledgers[0].capacity}",
                    )
                for each in ledgers:
                    _check_told(each, name)
