"""Checks of victims when room is made (E1, E2, E3, E5, E6, L5, R3).

Every eviction goes through `Evictor` of `kvgraft.requests.eviction`, one pool and one target at a
time. So each call can be compared with the operation's need and with the books before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

from kvgraft.cache import Cache
from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft.tree.component import CAUSES, TreeComponent
from kvgraft.tree.ledger import PoolBooks
from kvgraft.tree.node import Node
from kvgraft.types import Direction, Tier
from kvgraft_guard.books import (
    CLEARED,
    EVICTABLE,
    FREE,
    IN_FLIGHT,
    PINNED,
    Books,
    Counts,
    Reading,
)
from kvgraft_guard.order import Order
from kvgraft_guard.tenancy import Tenancy

__all__ = ["Evict", "Rooms"]

Evict = Callable[[TreeComponent, Tier, int, int | None], bool]
"""Frees slots of one pool for a tenant until enough are free; returns whether they are."""

DEMOTED, DELETED, CASCADE = map(CAUSES.index, CAUSES[:3])


class Rooms:
    """Watches a cache make room.

    Attributes:
        tenancy: checks of tenants that share the pools.
        active: whether an operation is being checked; set by `expect`, cleared at its end.
        left: whether data left the tree since `expect`.
    """

    def __init__(self, cache: Cache, books: Books) -> None:
        self.books = books
        self.tree = cache.tree
        self.active = False
        self.left = False
        write_back = cache.config.write_policy is WritePolicy.WRITE_BACK
        self.write_back = write_back and cache.backups.enabled
        self._device = range(books.n_device)
        self._host = range(books.n_device, books.n_tree)
        self._backups = cache.journal.queues[Direction.BACKUP]
        self._homes = any(component.home_is_host for component in cache.tree.components)
        self._needs: Sequence[int] = ()
        self._host_too = False
        self._loading = False
        self._inside = False
        self._evicted: list[int] | None = None
        self._victims = _Victims()
        self._order = Order(cache.tree)
        self.tenancy = Tenancy(cache.tree)
        self._demoting = False

    # -- reports of data that leaves the tree

    def sinks(self, node: Node) -> None:
        """Cells of a node lost their DEVICE data."""
        self.left = True
        order = self._order
        if self._victims.take(node, on_device=True):
            self.tenancy.victim(node)
            gone = [
                component
                for component, had in zip(self.tree.components, order.held(node))
                if had and node.cells[component.index].device is None
            ]
            order.take(node, gone, on_device=True)
        elif self._victims.active:
            order.went(node)
        elif self._demoting and order.watching:
            order.take(node, None, on_device=True)

    def drops(self, node: Node) -> None:
        """A cell of a node will lose its HOST data."""
        self.left = True
        if self._victims.take(node, on_device=False):
            self.tenancy.victim(node)
            self._order.take(node, None, on_device=False)
        elif self._victims.active:
            self._order.went(node)

    def removes(self, node: Node) -> None:
        """All that a victim takes along is gone."""
        if self._homes and self._victims.active:
            self._check_homes(node)
        self._victims.freed(node)

    def _check_homes(self, node: Node) -> None:
        """Where a canonical copy left HOST, nothing of it stays on DEVICE that nobody pins (E5)."""
        for component, cell in zip(self.tree.components, node.cells):
            lone = component.home_is_host and cell.host is None and cell.incoming is None
            if lone and cell.device is not None and not cell.device_pins:
                raise ContractViolation(
                    "E5",
                    component.name,
                    f"{node!r} lost its canonical copy on HOST and keeps "
                    f"{component.n_slots(node)} slots on DEVICE",
                )

    def expect(self, needs: Sequence[int], *, host_too: bool, loading: bool = False) -> None:
        """An operation begins that may make room on DEVICE for `needs`, per component.

        Args:
            needs: slots that must be free for it.
            host_too: whether it may make room on HOST.
            loading: whether it is a load-back, whose shortfalls rule R3 is about.
        """
        self._needs, self._host_too, self._loading = needs, host_too, loading
        self._evicted = None
        self.left = False
        self.active = True

    # -- the two ways to make room

    def evict_device(
        self, evict: Evict, component: TreeComponent, n_slots: int, tenant: int | None
    ) -> bool:
        """`Evictor.evict_for` on DEVICE, and a check of its effect."""
        ledger = component.device if tenant is None else component.devices[tenant]
        if not self.active or n_slots <= ledger.room:
            return evict(component, Tier.DEVICE, n_slots, tenant)
        if n_slots > self._needs[component.index]:
            self._raise_not_needed(component, n_slots, self._needs[component.index])
        was = self.books.read()
        self._inside = True
        if not self.write_back:
            self._victims.begin(ledger, n_slots, on_device=True)
        self._demoting = self.write_back
        if not self.tenancy.shared:
            self._order.begin(component, on_device=True, exact=not self.write_back)
        outside = self.tenancy.begin(component, tenant, on_device=True)
        try:
            made = evict(component, Tier.DEVICE, n_slots, tenant)
        finally:
            self._inside = self._demoting = False
            self._victims.end()
        self._order.end(ledger, n_slots)
        self.tenancy.end(outside, made=made or self.write_back)
        now = self.books.read()
        self._check_outcome(component, ledger, n_slots, made=made)
        self._check_losses(component, self._device, was, now)
        if not made and self.write_back:
            self._check_waited(component)
        if not self.write_back and not made and ledger.evictable:
            raise ContractViolation(
                "E6",
                component.name,
                f"making room for {n_slots} slots stopped at free({ledger.free}) with "
                f"evictable({ledger.evictable}) left",
            )
        return made

    def evict_host(
        self, evict: Evict, component: TreeComponent, n_slots: int, tenant: int | None
    ) -> bool:
        """`Evictor.evict_for` on HOST, and a check of its effect."""
        ledger = component.host if tenant is None else component.hosts[tenant]
        if not self.active or ledger is None or n_slots <= ledger.room:
            return evict(component, Tier.HOST, n_slots, tenant)
        if not self._host_too:
            self._raise_not_needed(component, n_slots, 0)
        was = self.books.read()
        inside, self._inside = self._inside, True
        self._victims.begin(ledger, n_slots, on_device=False)
        if not inside and not self.tenancy.shared:
            self._order.begin(component, on_device=False, exact=True)
        outside = self.tenancy.begin(component, tenant, on_device=False)
        try:
            made = evict(component, Tier.HOST, n_slots, tenant)
        finally:
            self._inside = inside
            self._victims.end()
        if not inside:
            self._order.end(ledger, n_slots)
        self.tenancy.end(outside, made=made)
        now = self.books.read()
        self._check_outcome(component, ledger, n_slots, made=made)
        self._check_losses(component, self._host, was, now)
        if not self._homes:
            self._check_device_alone(component, was, now)
        return made

    # -- one call

    def _check_waited(self, component: TreeComponent) -> None:
        """Room is short: every copy that holds some was waited for, or one before it (E4)."""
        queue = self._backups
        first = queue[0] if queue else None
        if first is None or (first.late and not first.ticket.done):
            return
        holding = [
            each
            for each in queue
            if each.operation is not None
            and any(pair.component == component.index for pair in each.operation.pairs)
        ]
        if holding:
            raise ContractViolation(
                "E4",
                component.name,
                f"room is short, and {len(holding)} copies that hold some of it were not waited "
                "for",
            )

    def _raise_not_needed(self, component: TreeComponent, n_slots: int, needed: int) -> NoReturn:
        evidence = f"room is made for {n_slots} slots where the operation needs {needed}"
        if self._loading:
            raise ContractViolation("R3", component.name, evidence)
        raise ContractViolation("E2", component.name, evidence)

    def _check_outcome(
        self, component: TreeComponent, ledger: PoolBooks, n_slots: int, *, made: bool
    ) -> None:
        """It says whether there is enough now (E6), and stopped when there was (E2)."""
        if made is not (ledger.room >= n_slots):
            raise ContractViolation(
                "E6",
                component.name,
                f"making room for {n_slots} {ledger.tier.value} slots answers {made} with "
                f"free({ledger.free})",
            )
        if self._victims.beyond is not None:
            raise ContractViolation(
                "E2",
                component.name,
                f"{self._victims.beyond!r} was evicted on {ledger.tier.value} when free was "
                f"{self._victims.enough} already and {n_slots} were needed; free is {ledger.free}",
            )

    def _check_losses(
        self, component: TreeComponent, tier: range, was: Reading, now: Reading
    ) -> None:
        """Evicted data was chosen or went along as it may, and the books agree."""
        copies = self.write_back and tier is self._device
        if not self._inside:
            # Within a demotion the room on HOST is part of the room on DEVICE.
            self._evicted = self._evicted or [0] * self.books.n_tree
        strays: list[tuple[int, int]] = []
        unreachable = False
        for at, (then, left) in enumerate(zip(was.left, now.left)):
            before, after = was.counts[at], now.counts[at]
            if before == after and then == left:
                continue
            grown = sum(left) - sum(then)
            along = left[CASCADE] - then[CASCADE]
            other = self.books.pools[at].tree_component
            if self._evicted is not None and not self._inside:
                self._evicted[at] += grown - along
            if grown != along and other.is_prefix_closed:
                unreachable = True
            if other is not component and at in tier:
                # Under write-back all that leaves with a victim is demoted.
                chosen = left[DELETED] - then[DELETED]
                chosen += 0 if copies else left[DEMOTED] - then[DEMOTED]
                if chosen:
                    self._raise_other_victims(component, at, chosen)
                if along and other.index not in component.narrower:
                    strays.append((at, along))
            if not copies:
                self._check_books(component, at, before, after, grown)
        if strays and not unreachable and not copies:
            self._raise_strays(component, *strays[0])

    def _raise_other_victims(self, component: TreeComponent, at: int, chosen: int) -> NoReturn:
        """Victims are the short pool's own (R3, E2)."""
        pool = self.books.pools[at]
        evidence = (
            f"its {pool.name} pool was short and {chosen} slots of {pool.component!r} were chosen "
            f"as victims; {pool.ledger.equation()}"
        )
        if self._loading:
            raise ContractViolation("R3", component.name, evidence)
        raise ContractViolation("E2", component.name, evidence)

    def _raise_strays(self, component: TreeComponent, at: int, along: int) -> NoReturn:
        """Only contained components go along, unless prefix-closed data is gone (E3)."""
        pool = self.books.pools[at]
        raise ContractViolation(
            "E3",
            component.name,
            f"making room took {along} {pool.name} slots of {pool.component!r} along, whose reach "
            "is not contained in its own",
        )

    def _check_books(
        self, component: TreeComponent, at: int, before: Counts, after: Counts, grown: int
    ) -> None:
        """Freed slots were evictable, and the counters agree (E1, L5, E6)."""
        freed = after[FREE] - before[FREE]
        same = before[PINNED] == after[PINNED] and before[IN_FLIGHT] == after[IN_FLIGHT]
        if same and freed == before[EVICTABLE] - after[EVICTABLE] == grown:
            return
        pool = self.books.pools[at]
        where = f"making room for {component.name!r}: {pool.name} pool of {pool.component!r}"
        if before[PINNED] != after[PINNED]:
            raise ContractViolation(
                "E1",
                pool.component,
                f"{where}: pinned went from {before[PINNED]} to {after[PINNED]}",
            )
        if before[IN_FLIGHT] != after[IN_FLIGHT]:
            raise ContractViolation(
                "L5",
                pool.component,
                f"{where}: in flight went from {before[IN_FLIGHT]} to {after[IN_FLIGHT]}",
            )
        raise ContractViolation(
            "E6",
            pool.component,
            f"{where}: {freed} slots became free, {before[EVICTABLE] - after[EVICTABLE]} were "
            f"evictable, {grown} are counted as evicted",
        )

    def _check_device_alone(self, component: TreeComponent, was: Reading, now: Reading) -> None:
        """HOST eviction leaves DEVICE alone (E5)."""
        for at in self._device:
            if was.counts[at] != now.counts[at]:
                pool = self.books.pools[at]
                raise ContractViolation(
                    "E5",
                    pool.component,
                    f"making room on HOST for {component.name!r} changed its device pool from "
                    f"{was.counts[at]} to {now.counts[at]} (free, evictable, pinned, private, in "
                    "flight, promised)",
                )

    # -- the operation

    def check_operation(self, name: str, was: Reading, now: Reading) -> None:
        """Only making room for a shortfall evicted data (E2)."""
        evicted = self._evicted
        for at, (then, left) in enumerate(zip(was.left, now.left)):
            if then == left:
                continue
            cleared = left[CLEARED] - then[CLEARED]  # it may leave at any time
            grown = sum(left) - left[CASCADE] - sum(then) + then[CASCADE] - cleared
            accounted = evicted[at] if evicted is not None else 0
            if grown != accounted:
                pool = self.books.pools[at]
                raise ContractViolation(
                    "E2",
                    pool.component,
                    f"{grown} slots were evicted from the {pool.name} pool by {name}, {accounted} "
                    f"of them because it was short; {pool.ledger.equation()}",
                )


class _Victims:
    """Which node is being evicted, and whether that was still needed.

    The tree is notified of a victim when its cells are gone, and asked to remove it when all that
    went along is; data freed between the two belongs to it.

    Attributes:
        beyond: the first victim taken when there was enough already.
        enough: slots free then.
    """

    def __init__(self) -> None:
        self.beyond: Node | None = None
        self.enough = 0
        self._free = 0
        self._ledger: PoolBooks | None = None
        self._target = 0
        self._on_device = False
        self._open: Node | None = None

    def begin(self, ledger: PoolBooks, target: int, *, on_device: bool) -> None:
        self._ledger, self._target, self._on_device = ledger, target, on_device
        self.beyond, self._free, self._open = None, ledger.room, None

    def end(self) -> None:
        self._ledger = None

    def freed(self, node: Node) -> None:
        """All that a victim takes along is gone."""
        if self._ledger is not None and node is self._open:
            self._open, self._free = None, self._ledger.room

    @property
    def active(self) -> bool:
        """Whether victims are being taken."""
        return self._ledger is not None

    def take(self, node: Node, *, on_device: bool) -> bool:
        """Data leaves a node on a tier; whether it is a victim, or goes along with one."""
        if self._ledger is None or self._open is not None or on_device is not self._on_device:
            return False
        self._open = node
        if self._free >= self._target and self.beyond is None:
            self.beyond, self.enough = node, self._free
        return True
