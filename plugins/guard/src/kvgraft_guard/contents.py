"""Checks that bytes do not change and arrive as they left (B3, R5, T9).

The guard keeps the checksum of one row of every cell that gains data; a match reads the row again.
When a transfer ends, a few rows of source and target are compared. Where the engine passes fences,
data may be written later than its slots are taken, so no checksum is kept. Pools without payload
have no bytes: only the row numbers of their transfers are checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from kvgraft.cache import Cache
from kvgraft.errors import ContractViolation
from kvgraft.pools import Component
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import Request
from kvgraft.requests.tables import state_number
from kvgraft.transfers import PlaneCopy, Transfer
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft.types import Direction, Tier
from kvgraft_guard.copying import check_copies

__all__ = ["Contents"]

ROWS = 3
"""Rows compared of each plane that a transfer copies."""

PLANES = 4
"""Planes compared of each component."""

NODES = 4
"""Nodes above an anchor of which a row is read again."""


class Contents:
    """Checks bytes of one cache's pools.

    Args:
        cache: the cache whose tree notes the data that arrives.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.tree = cache.tree
        self._payload = cache.config.payload
        self._kept: dict[tuple[Tier, int, int], int] = {}
        self._sources: dict[int, list[tuple[PlaneCopy, list[int], int]]] = {}
        self._planes = [self._shared_plane(each.component) for each in cache.mounted]

    def _shared_plane(self, component: Component) -> tuple[Any, Any]:
        """Rows of a plane that pool and mirror both have: those of the pool, and of the mirror."""
        mirror: dict[tuple[int, str], Any] = {}
        if component.host is not None:
            for spec, lanes in zip(component.host.specs, component.host.lanes):
                mirror[spec.layer, spec.name] = lanes
        pool = component.device
        for spec, lanes in zip(pool.specs, pool.lanes):
            if not mirror or (spec.layer, spec.name) in mirror:
                return lanes, mirror.get((spec.layer, spec.name))
        return None, None

    def _sum(self, tier: Tier, component: TreeComponent, slot: int) -> int | None:
        lanes = self._planes[component.index][0 if tier is Tier.DEVICE else 1]
        if lanes is None or slot >= len(lanes):
            return None
        return crc32(lanes[slot].cpu().contiguous().numpy().tobytes())

    def arrived(self, tier: Tier, component: TreeComponent, slots: bytes) -> None:
        """Data arrived: note the first row, and forget the slots' earlier content."""
        if not self._payload:
            return
        for each in memoryview(slots).cast("i"):
            self._kept.pop((tier, component.index, each), None)
        if self.cache.journal.fence is not None or component.home_is_host or not slots:
            return
        slot = state_number(slots[:SLOT_BYTES])
        found = self._sum(tier, component, slot)
        if found is not None:
            self._kept[tier, component.index, slot] = found

    def moved(self, tier: Tier, component: TreeComponent, source: bytes, target: bytes) -> None:
        """Slots moved: their bytes came along (K7)."""
        if not self._payload:
            return
        pairs = list(zip(memoryview(source).cast("i"), memoryview(target).cast("i")))
        kept = [self._kept.pop((tier, component.index, old), None) for old, _ in pairs]
        for (old, new), known in zip(pairs, kept):
            self._kept.pop((tier, component.index, new), None)
            if known is not None:
                self._kept[tier, component.index, new] = known
            # What is known may be of older data: a request writes its own slots unseen.
            if self._sum(tier, component, new) != self._sum(tier, component, old):
                raise ContractViolation(
                    "K7",
                    component.name,
                    f"{tier.value} slot {old} moved to {new}, which has other bytes",
                )

    def check_path(self, request: Request) -> None:
        """Matched pages hold the bytes they were shared with (B3, T9)."""
        node, left = request.receipt.anchor, NODES
        while node.parent is not None and left:
            for component, cell in zip(self.tree.components, node.cells):
                for tier, slots in ((Tier.DEVICE, cell.device), (Tier.HOST, cell.host)):
                    if slots is not None:
                        self._check_row(tier, node, component, slots)
            node, left = node.parent, left - 1

    def _check_row(self, tier: Tier, node: Node, component: TreeComponent, slots: bytes) -> None:
        slot = state_number(slots[:SLOT_BYTES])
        kept = self._kept.get((tier, component.index, slot))
        if kept is not None and kept != self._sum(tier, component, slot):
            raise ContractViolation(
                "B3",
                component.name,
                f"{node!r} is in {tier.value} slot {slot}, whose bytes changed since it got there",
            )

    # -- transfers

    def submitted(self, transfer: Transfer) -> None:
        """The engine has the copies: they are the transfer's, and their sources stay (B3)."""
        copies = transfer.ticket.copies
        for mounted, query in transfer.queries:
            component = mounted.component
            if component.host is None:
                continue
            mine = {id(lanes) for lanes in (*component.device.lanes, *component.host.lanes)}
            own = [each for each in copies if {id(each.source), id(each.target)} & mine]
            if own:
                check_copies(mounted.name, component, query, own)
        if self._payload and self.cache.journal.fence is None:
            self._sources[id(transfer)] = [
                (copy, rows, self._sum_rows(copy.source, copy.source_rows, rows))
                for copy, rows in self._sampled(transfer)
            ]

    def _sampled(self, transfer: Transfer) -> list[tuple[PlaneCopy, list[int]]]:
        """Copies between a pool and its mirror, and the positions of rows to read."""
        found: list[tuple[PlaneCopy, list[int]]] = []
        for mounted, _ in transfer.queries:
            component = mounted.component
            if component.host is None or mounted.plugin.declaration.home is Tier.HOST:
                continue
            device = {id(lanes) for lanes in component.device.lanes}
            host = {id(lanes) for lanes in component.host.lanes}
            own = [
                copy
                for copy in transfer.ticket.copies
                if (id(copy.source) in device and id(copy.target) in host)
                or (id(copy.source) in host and id(copy.target) in device)
            ]
            for copy in own[:: max(1, len(own) // PLANES)]:
                last = len(copy.source_rows) - 1
                if last >= 0:
                    found.append((copy, sorted({0, last // 2, last})[:ROWS]))
        return found

    def _sum_rows(self, lanes: Any, rows: Any, positions: Sequence[int]) -> int:
        total = 0
        for at in positions:
            total = crc32(lanes[int(rows[at])].cpu().contiguous().numpy().tobytes(), total)
        return total

    def forget(self, transfer: Transfer) -> None:
        """Forget a transfer that was not checked: another one may get its `id()` later."""
        self._sources.pop(id(transfer), None)

    def ending(self, transfer: Transfer) -> None:
        """The copies have ended: target rows equal the source rows, then and now (B3, R5)."""
        sources = self._sources.pop(id(transfer), [])
        if transfer.ticket.error is not None:
            return
        for copy, rows, before in sources:
            now = self._sum_rows(copy.source, copy.source_rows, rows)
            arrived = self._sum_rows(copy.target, copy.target_rows, rows)
            if before == now == arrived:
                continue
            changed = before != now
            raise ContractViolation(
                "B3" if changed or transfer.direction is Direction.BACKUP else "R5",
                None,
                f"a {transfer.direction.value} of {len(copy.source_rows)} rows of layer "
                f"{copy.layer} ends and its {'sources changed' if changed else 'targets differ'}",
            )
