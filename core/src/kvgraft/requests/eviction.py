"""Making room in one pool, under the cache's write policy (R3, E4)."""

from __future__ import annotations

from typing import Any, Final

from kvgraft.compiled import mypyc_attr
from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation, KvgraftError
from kvgraft.optional import load_part
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.transfers.journal import Journal, Transfer
from kvgraft.tree import eviction, operations
from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.tree.eviction import Victim
from kvgraft.tree.ledger import DEVICE, HOST
from kvgraft.tree.tree import Tree
from kvgraft.types import Direction, Tier

MOST_PIECES: Final = 16
"""A victim is copied in at most this many pieces, each of which is waited for."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Evictor:
    """Frees exactly the slots that are short, one pool at a time.

    Args:
        tree: decides on victims.
        journal: copies them out first under write-back.
        policy: the write policy.
        timeout_s: longest wait for a copy; then data is dropped instead (E4).

    Attributes:
        failed_demotions: victims whose copies could not be begun, and that were dropped.
    """

    def __init__(self, tree: Tree, journal: Journal, policy: WritePolicy, timeout_s: float) -> None:
        self.tree = tree
        self.journal = journal
        self.timeout_s = timeout_s
        self.write_back = policy is WritePolicy.WRITE_BACK and bool(tree.mirrored)
        self.failed_demotions = 0
        self._sweeper: Any = None

    @property
    def sweeper(self) -> Any:
        """Frees cleared data, which goes before all other (`kvgraft_retention.clearing`)."""
        if self._sweeper is None:
            self._sweeper = load_part("sweeper")(self.tree)
        return self._sweeper

    def finish_sweep(self) -> None:
        """Free all unpinned cleared data."""
        if self._sweeper is not None:
            self._sweeper.finish()

    def ensure_free(
        self, component: TreeComponent, tier: Tier, n_slots: int, tenant: int | None
    ) -> bool:
        """Free slots of one component's pool until `n_slots` are free; whether they are.

        Takes nothing from a pool that is not short (E2), and nothing at all if they are free.

        Args:
            component: whose pool.
            tier: which of its pools.
            n_slots: slots that are to be free.
            tenant: whose request needs them: victims are its own data, and what others borrowed
                (K4, K5); None takes any data.
        """
        #   cleared ─► evict-first, oldest first ─► the clean reserve ─► the policy's order
        ledger = component.books_for(tier, tenant)
        if n_slots <= ledger.room:
            return True
        if self._sweeper is not None and self._sweeper.is_behind:
            self._sweeper.ensure_free(ledger, n_slots)
        return n_slots <= ledger.room or self.evict_for(component, tier, n_slots, tenant)

    def evict_for(
        self, component: TreeComponent, tier: Tier, n_slots: int, tenant: int | None
    ) -> bool:
        """`ensure_free` after the sweeper freed cleared data, as far as it got."""
        ledger = component.books_for(tier, tenant)
        asked, self.tree.for_tenant = self.tree.for_tenant, tenant
        try:
            if tier is HOST:
                eviction.evict_host(self.tree, component, n_slots - ledger.room)
            elif self.write_back:
                self._demote(component, n_slots)
            else:
                eviction.evict_device(self.tree, component, n_slots - ledger.room)
        finally:
            self.tree.for_tenant = asked
        return ledger.room >= n_slots

    def ensure_promised(
        self, component: TreeComponent, n_slots: int, tenant: int, promised: int
    ) -> None:
        """Free DEVICE slots of one component until `n_slots` are free (A7).

        A request was promised `promised` of them; the others come out of the headroom.
        """
        ledger = component.ledger(DEVICE, tenant)
        others = max(0, n_slots - promised)
        ledger.promised += others
        try:
            made = self.ensure_free(component, DEVICE, n_slots, tenant)
        finally:
            ledger.promised -= others
        if not made:
            raise ContractViolation(
                "A7",
                component.name,
                f"needed({n_slots}), promised({promised}), and {component.device.equation()}",
            )

    def evict(self, component: TreeComponent, n_slots: int, tier: Tier) -> int:
        """Evict until `n_slots` more slots are free; returns how many were freed (E6)."""
        pool = component.device if tier is DEVICE else component.host
        if pool is None:
            return 0
        before = pool.free
        self.ensure_free(component, tier, before + n_slots, None)
        return pool.free - before

    def _demote(self, component: TreeComponent, n_slots: int) -> None:
        """Evict with a backup first; data that HOST cannot take is dropped, so that room is made.

        A copy holds its slots until it ends, and may never end: it takes them out of the headroom,
        and what that lacks is dropped, so promises do not depend on copies (A7). Waits for each
        copy, at most `timeout_s`; slots still missing then come from other victims, unbacked: a
        slow or failed backup never blocks device progress (E4).
        """
        #   until  room + on_their_way >= n_slots:
        #     victim ─┬─ has a copy, or HOST takes none ─► dropped: room grows
        #             ├─ headroom without it >= 0 ──► copied: on_their_way grows, headroom falls
        #             └─ else: wait for its components' copies, and copy the part that fits
        #   then wait for those copies; what still lacks is dropped: room >= n_slots
        ledger = component.books_for(DEVICE, self.tree.for_tenant)
        leaving: list[Transfer] = []
        on_their_way = 0
        while ledger.room + on_their_way < n_slots:
            victim = eviction.next_device_victim(self.tree, component)
            if victim is None:
                break
            unbacked = self._unbacked(victim)
            if unbacked and not _is_afforded(victim, unbacked):
                self._settle(self._copies_of(unbacked))
                on_their_way = 0  # they have ended, or are overdue
                if ledger.room >= n_slots:
                    if self.tree.is_candidate(victim.node, component, DEVICE):
                        component.device.queue.push(victim.node)
                    break
                if not eviction.still_there(victim):
                    continue
                victim = self._cut(victim, unbacked)
                unbacked = self._unbacked(victim)
            operation = self._begin(victim, unbacked)
            if operation is not None:
                on_their_way += sum(
                    len(slots) // SLOT_BYTES
                    for index, slots in operation.detached
                    if index == component.index
                )
                try:
                    leaving.append(self.journal.submit(operation, Direction.BACKUP))
                except ContractViolation:
                    raise
                except KvgraftError:
                    self.failed_demotions += 1  # the journal freed the victim's slots already
            elif eviction.still_there(victim):
                eviction.evict_victim(self.tree, victim)
        self._settle(leaving)
        self._drop(component, n_slots)
        if ledger.room < n_slots:
            # Overdue copies of earlier calls and copies of the clean reserve hold slots, too.
            self._settle(self._copies_of([component]))
            self._drop(component, n_slots)

    def _settle(self, transfers: list[Transfer]) -> None:
        """Wait for copies to end, if there are any, each at most `timeout_s`."""
        if transfers:
            self.journal.counters[Direction.BACKUP].waits += 1
            self.journal.settle(transfers, self.timeout_s)

    def _drop(self, component: TreeComponent, n_slots: int) -> None:
        """Evict what is still missing to `n_slots`, copied or not."""
        ledger = component.books_for(DEVICE, self.tree.for_tenant)
        if ledger.room < n_slots:
            eviction.evict_device(self.tree, component, n_slots - ledger.room)

    def _copies_of(self, components: list[TreeComponent]) -> list[Transfer]:
        """Transfers to HOST that hold DEVICE slots of some components until they end."""
        indexes = {component.index for component in components}
        return [
            transfer
            for transfer in self.journal.queues[Direction.BACKUP]
            if transfer.operation is not None
            and any(pair.component in indexes for pair in transfer.operation.pairs)
        ]

    def _unbacked(self, victim: Victim) -> list[TreeComponent]:
        """Components whose data leaves and has no copy; none if HOST does not take it."""
        if self.journal.is_stalled(Direction.BACKUP):
            return []
        unbacked = [
            each
            for each in operations.needs_backup(self.tree, victim.node)
            if each in victim.components
        ]
        admitted = all(eviction.is_admitted(self.tree, victim, each) for each in unbacked)
        return unbacked if admitted else []

    def _cut(self, victim: Victim, unbacked: list[TreeComponent]) -> Victim:
        """The part of a victim that promises hold without; all of it where that is small.

        What every boundary below needs goes from its end, other pages the oldest first.
        """
        node, component = victim.node, victim.component
        afforded, pages = _afforded_pages(victim, unbacked), node.end - node.start
        if not pages <= afforded * MOST_PIECES or afforded == pages:
            return victim
        if component.is_prefix_closed or component.is_state:
            self.tree.split(node, node.end - afforded)
            return victim
        first = self.tree.split(node, node.start + afforded)
        component.device.queue.push(node)
        return eviction.victim_at(self.tree, first, component) or victim

    def _begin(self, victim: Victim, unbacked: list[TreeComponent]) -> operations.Operation | None:
        """Reserve HOST slots for a victim's data; None if HOST is full, or promises need DEVICE."""
        node = victim.node
        if not unbacked or not _is_afforded(victim, unbacked):
            return None
        for component in unbacked:
            # The copy belongs to the same tenant, so that tenant's share of HOST must hold it.
            ledger, n_slots = component.ledger(HOST, node.tenant), component.n_slots(node)
            fits = n_slots <= ledger.headroom
            if not fits or not self.ensure_free(component, HOST, n_slots, node.tenant):
                return None
        parent = node.parent
        if parent is None or not eviction.still_there(victim):
            return None
        along: Cause = "leaf" if victim.at_leaf else "cascade"
        eviction.lift_recency(self.tree, node, parent)
        return operations.begin_demotion(
            self.tree, node, victim.component, victim.components, along
        )


def _is_afforded(victim: Victim, unbacked: list[TreeComponent]) -> bool:
    """Whether promises hold without a victim's DEVICE slots, for as long as its copy takes."""
    return _afforded_pages(victim, unbacked) >= victim.node.end - victim.node.start


def _afforded_pages(victim: Victim, unbacked: list[TreeComponent]) -> int:
    """The last pages of a victim that promises hold without; all of them, or fewer."""
    node = victim.node
    pages = node.end - node.start
    for component in unbacked:
        room = min(component.device.headroom, component.devices[node.tenant].headroom)
        if component.is_state:
            pages = pages if room > 0 else 0
        else:
            pages = min(pages, max(0, room) // component.slots_per_page)
    return pages
