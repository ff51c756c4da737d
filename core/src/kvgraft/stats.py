"""Counts of a cache, as values that `Cache.stats()` returns.

Slots are in each pool's own units. Counts grow from the time the cache was opened; a pool's owners
are those at the call. Every value is a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvgraft.types import PointKind

__all__ = [
    "CacheStats",
    "ComponentStats",
    "PointStats",
    "PoolStats",
    "RequestStats",
    "SlotHits",
    "TokenStats",
    "TransferStats",
]


class TokenStats(NamedTuple):
    """Tokens of prompts, and tokens computed.

    A request counts once: when it is admitted, and not again after a `restart`, or after it was
    retracted and begun again with the same key.

    Attributes:
        asked: prompt tokens of admitted requests.
        device: those of them that were resumed from DEVICE alone.
        host: tokens that HOST had.
        storage: those that HOST had because STORAGE brought them for their request.
        computed: tokens computed, prompts' and decoded ones, also of requests that were aborted.
        recomputed: those that requests lost when they were retracted or restarted, and computed
            again.
    """

    asked: int
    device: int
    host: int
    storage: int
    computed: int
    recomputed: int

    @property
    def reused(self) -> int:
        """Prompt tokens that need not be computed, from any tier."""
        return self.device + self.host + self.storage


class SlotHits(NamedTuple):
    """One component's slots that admitted requests resume from, by the tier that had them.

    Attributes:
        device: on DEVICE, or on their way there for another request.
        host: on HOST alone; a load-back brings them.
        storage: the same, but STORAGE brought them to HOST for their request.
    """

    device: int
    host: int
    storage: int


class PoolStats(NamedTuple):
    """The slots of one pool by owner, and those that were evicted.

    `free + evictable + pinned + private + in_flight == capacity` (T8).

    Attributes:
        capacity: all slots.
        free: not in use.
        evictable: in the tree and not pinned.
        pinned: in the tree, held for a request or a transfer.
        private: owned by running requests.
        in_flight: reserved by transfers that have not ended.
        promised: promised to admitted requests that have not taken them yet, beside the equation.
        evicted: slots that left the tree so far, by cause: `demoted` and `deleted` where this pool
            was short, with and without a copy on another tier; `cascade` and `leaf` along with
            others; `cleared` by `Cache.clear`. Empty of a private pool.
        closing: slots in use that will move to another pool: the headroom keeps one free for each.
            Always 0 without one budget for several pools.
    """

    capacity: int
    free: int
    evictable: int
    pinned: int
    private: int
    in_flight: int
    promised: int
    evicted: Mapping[str, int]
    closing: int = 0

    @property
    def headroom(self) -> int:
        """Slots that may be given away without breaking a promise."""
        return self.free + self.evictable - self.promised - self.closing

    @property
    def owners(self) -> dict[str, int]:
        """The slots by owner; together they are the capacity."""
        return {
            "free": self.free,
            "evictable": self.evictable,
            "pinned": self.pinned,
            "private": self.private,
            "in_flight": self.in_flight,
        }


class ComponentStats(NamedTuple):
    """One component's hits and pools.

    Attributes:
        hits: slots that admitted requests resume from.
        device: its DEVICE pool.
        host: its HOST pool; None without one.
        private: its private pools, in their order.
    """

    hits: SlotHits
    device: PoolStats
    host: PoolStats | None
    private: tuple[PoolStats, ...]


class RequestStats(NamedTuple):
    """Requests, and steps of their lives.

    Attributes:
        leased: begun and not admitted, now.
        running: admitted and not ended, now.
        admitted: admissions so far.
        checkpoints: calls that shared something.
        declined_checkpoints: calls that found no headroom to share it (A12).
        copies_on_write: states copied for a request that writes to them (M8).
        shared_loads: load-backs of others that requests waited for (R6).
        skipped_loads: prefixes computed again because loading them was estimated slower (R8).
    """

    leased: int
    running: int
    admitted: int
    checkpoints: int
    declined_checkpoints: int
    copies_on_write: int
    shared_loads: int
    skipped_loads: int


class TransferStats(NamedTuple):
    """Transfers of one direction.

    Attributes:
        started: so far.
        completed: those that delivered everything.
        failed: those that delivered nothing, or not all.
        in_flight: started and not acknowledged, now.
        slots: slots whose copies were started, by component.
        waits: evictions on DEVICE that waited for them; of backups alone.
    """

    started: int
    completed: int
    failed: int
    in_flight: int
    slots: Mapping[str, int]
    waits: int = 0


class PointStats(NamedTuple):
    """Resume points of one kind (I10, I11).

    Attributes:
        made: boundaries whose data went to the tree.
        used: requests that were admitted and resume there.
        skipped: points left out because a state had no slot.
        lost: points that lost data from its last tier.
    """

    made: int
    used: int
    skipped: int
    lost: int


class CacheStats(NamedTuple):
    """All of a cache's counts.

    Attributes:
        tokens: of prompts, by the tier they were reused from, and computed.
        requests: running and waiting, and steps of their lives.
        components: by name, in the tree's order.
        load_backs: transfers from HOST to DEVICE.
        backups: transfers from DEVICE to HOST.
        points: resume points by kind.
        storage: the storage tier, as `kvgraft_storage.stats.StorageStats`; None without one.
        tenants: by name, as `kvgraft_retention.stats.TenantStats`; empty without any.
        pins: pinned prefixes by owner, as `kvgraft_retention.stats.PinStats`.
    """

    tokens: TokenStats
    requests: RequestStats
    components: Mapping[str, ComponentStats]
    load_backs: TransferStats
    backups: TransferStats
    points: Mapping[PointKind, PointStats]
    storage: Any
    tenants: Mapping[str, Any] = MappingProxyType({})
    pins: Mapping[str, Any] = MappingProxyType({})
