"""Tenants that share pools: their books, and which one loses data for which (K4, K5).

Every namespace belongs to a tenant, so every node does (`Node.tenant`). A tenant has a ledger of
its own in every pool, and the pool's own terms are the sums. Per pool, in slots:

    used       evictable + pinned + private + in flight
    committed  what its requests hold and are promised: used - evictable + promised
    over       used - leaving - guarantee: slots that it has borrowed
    claim      max(guarantee, committed - leaving) + leaving: others cannot have it

Admissions, pins and demotions keep `sum of claims <= capacity`: running requests never hold or
count on another's guarantee, so it is there when its tenant asks (A7, A8). Cached data may lie in
it, and is evicted for that tenant's requests. An eviction takes data of the tenant that borrowed
most for its weight (K5), and no more than it borrowed: not a slot of a guarantee (K4). A tenant at
its limit loses its own data.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvgraft.errors import ConfigError
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.requests.hits import HitCounts, Loaded
from kvgraft.requests.request import Request
from kvgraft.tree.ledger import Ledger, PoolBooks
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_retention.settings import OTHERS, TenantSettings
from kvgraft_retention.stats import PoolShare, TenantStats, TenantTokens

__all__ = [
    "SharedLedger",
    "ShortTenant",
    "Tenant",
    "TenantHitCounts",
    "TenantLedger",
    "Tenants",
    "tenants_of",
]

ROUNDING: Final = 1e-6
"""Slots by which rounding may make a share of a pool too small: 0.29 of 100 is 29."""


class Tenant(NamedTuple):
    """A tenant's shares.

    Attributes:
        name: its name.
        guarantees: by tier, the share of every pool that others' requests cannot take.
        limits: by tier, the largest share of every pool that it may have.
        weight: its part of the borrowed slots, relative to the others' weights.
    """

    name: str
    guarantees: Mapping[Tier, float]
    limits: Mapping[Tier, float]
    weight: float


class Tenants:
    """The tenants of a cache.

    Args:
        tenants: in the order of their indexes.
        namespaces: the tenant of a namespace, by index.
        prefixes: the tenant of text namespaces with this prefix, by index; the longest prefix
            counts.
        others: index of the tenant of all other namespaces.
    """

    def __init__(
        self,
        tenants: Sequence[Tenant],
        namespaces: Mapping[Hashable, int],
        prefixes: Mapping[str, int],
        others: int,
    ) -> None:
        self.tenants = tenants
        self._namespaces = namespaces
        self._prefixes = sorted(prefixes.items(), key=lambda item: -len(item[0]))
        self._others = others

    def hits(self, tree: Tree) -> HitCounts:
        """Counts hits of a cache, and of each tenant."""
        return TenantHitCounts(tree, self.tenants)

    def of(self, namespace: object) -> int:
        """The index of a namespace's tenant."""
        index = self._namespaces.get(namespace)
        if index is not None:
            return index
        if isinstance(namespace, str):
            for prefix, its in self._prefixes:
                if namespace.startswith(prefix):
                    return its
        return self._others

    def ledger(
        self, component: str, tier: Tier, allocator: SlotAllocator, granule: int
    ) -> SharedLedger:
        """The ledger of one pool; shares of it are rounded down to multiples of `granule` slots.

        Raises:
            ConfigError: a guarantee of less than one slot.
        """
        ledger = SharedLedger(component, tier, allocator, self.tenants, granule)
        for each in ledger.parts:
            share = each.tenant.guarantees[tier]
            if allocator.capacity and share and not each.guarantee:
                least = math.ceil(100 * granule / allocator.capacity) / 100
                raise ConfigError(
                    f"setting tenants: {each.tenant.name!r} has guarantee={share:g} of the "
                    f"{tier.value} pool of component {component!r}: of {allocator.capacity} slots "
                    f"that is none; give {least:g} or more, or a larger pool"
                )
        return ledger


def tenants_of(settings: Mapping[str, TenantSettings]) -> Tenants:
    """The tenants of some settings, and the one of all other namespaces."""
    settings = {**settings, OTHERS: settings.get(OTHERS, TenantSettings())}
    tenants = [
        Tenant(
            name,
            {Tier.DEVICE: each.guarantee, Tier.HOST: each.on_host[0]},
            {Tier.DEVICE: each.limit, Tier.HOST: each.on_host[1]},
            each.weight,
        )
        for name, each in settings.items()
    ]
    named = list(enumerate(settings.values()))
    return Tenants(
        tenants,
        {namespace: index for index, each in named for namespace in each.namespaces},
        {prefix: index for index, each in named for prefix in each.prefixes},
        list(settings).index(OTHERS),
    )


class ShortTenant(NamedTuple):
    """A tenant's part of a pool that is too small for its request.

    Attributes:
        name: its name.
        committed: slots that its requests hold and are promised.
        guarantee, limit: its slots of the pool.
    """

    name: str
    committed: int
    guarantee: int
    limit: int

    def __str__(self) -> str:
        return (
            f"tenant {self.name!r}: its requests have {self.committed}, its guarantee is "
            f"{self.guarantee}, its limit {self.limit}; others' guarantees are kept for them, see "
            "the setting tenants"
        )


class TenantLedger(Ledger):
    """One tenant's part of a pool's books.

    Attributes:
        pool: the pool's ledger.
        tenant: whose.
    """

    __slots__ = ("_fitted", "_granule", "_guarantee", "_limit", "pool", "tenant")

    def __init__(self, pool: SharedLedger, tenant: Tenant, granule: int) -> None:
        super().__init__(pool.component, pool.tier, pool.allocator)
        self.pool = pool
        self.tenant = tenant
        self._granule = granule
        self._fitted = -1
        self._guarantee = self._limit = 0

    def _fit(self) -> None:
        """Turn the shares into slots of the pool as it is now."""
        self._fitted = capacity = self.allocator.capacity
        shares = self.tenant.guarantees[self.tier], self.tenant.limits[self.tier]
        guarantee, limit = (int(share * capacity + ROUNDING) for share in shares)
        self._guarantee = guarantee - guarantee % self._granule
        self._limit = capacity if limit == capacity else limit - limit % self._granule

    @property
    def name(self) -> str:
        """Its tier and tenant, for messages."""
        return f"{self.tier.value} tenant {self.tenant.name!r}:"

    @property
    def guarantee(self) -> int:
        """Slots that others' requests cannot take."""
        if self._fitted != self.allocator.capacity:
            self._fit()
        return self._guarantee

    @property
    def limit(self) -> int:
        """Most slots it ever has."""
        if self._fitted != self.allocator.capacity:
            self._fit()
        return self._limit

    @property
    def used(self) -> int:
        """Its slots."""
        return self.evictable + self.pinned + self.private + self.in_flight

    @property
    def committed(self) -> int:
        """Slots that its requests and transfers hold, and those that are promised."""
        return self.pinned + self.private + self.in_flight + self.promised

    @property
    def claim(self) -> int:
        """Slots that others' promises must leave to it, those being demoted included."""
        leaving, guarantee = self.leaving, self.guarantee
        kept = self.committed - leaving
        return (kept if kept > guarantee else guarantee) + leaving

    @property
    def over(self) -> int:
        """Slots it has borrowed; those being demoted count as given back."""
        return self.used - self.leaving - self.guarantee

    @property
    def headroom(self) -> int:
        """Slots that may be given to it without breaking a promise or a guarantee."""
        others = 0
        for each in self.pool.parts:
            if each is not self:
                others += each.claim
        return min(self.allocator.capacity - others, self.limit) - self.committed

    @property
    def room(self) -> int:
        """Slots it can take without an eviction."""
        return min(self.allocator.n_free, self.limit - self.used)

    @property
    def rights(self) -> ShortTenant:
        """Its use of the pool, for the message of a shortage."""
        return ShortTenant(self.tenant.name, self.committed, self.guarantee, self.limit)

    def share(self) -> PoolShare:
        """A copy of the books."""
        return PoolShare(
            guarantee=self.guarantee,
            limit=self.limit,
            evictable=self.evictable,
            pinned=self.pinned,
            private=self.private,
            in_flight=self.in_flight,
            promised=self.promised,
            lost=self.lost,
        )

    @property
    def ceiling(self) -> int:
        """The most slots that its requests can hold beside others' guarantees."""
        others = sum([each.guarantee for each in self.pool.parts]) - self.guarantee
        return min(self.limit, self.allocator.capacity - others)


class SharedLedger(PoolBooks):
    """The books of a pool that tenants share: the sums of the tenants' ledgers."""

    __slots__ = ("_parts",)

    def __init__(
        self,
        component: str,
        tier: Tier,
        allocator: SlotAllocator,
        tenants: Sequence[Tenant],
        granule: int,
    ) -> None:
        super().__init__(component, tier, allocator)
        self._parts = tuple([TenantLedger(self, tenant, granule) for tenant in tenants])

    @property
    def parts(self) -> tuple[TenantLedger, ...]:
        """The tenants' ledgers, by index."""
        return self._parts

    @property
    def headroom(self) -> int:
        """Slots without a guarantee that no request holds or is promised."""
        return self.allocator.capacity - sum([each.claim for each in self._parts])

    def giver(self, for_tenant: int | None, candidates: Any) -> int | None:
        """The tenant that loses data next: it borrowed most for its weight; None if none has to.

        The requesting tenant may lose any of its own data, others only borrowed slots (K4, K5). A
        tenant at its limit must lose its own.
        """
        if for_tenant is not None:
            own = self._parts[for_tenant]
            if own.limit - own.used <= own.allocator.n_free:
                return for_tenant
        found, most = None, (0.0, False)
        for index, ledger in enumerate(self._parts):
            if not candidates.waits(index):
                continue
            over = ledger.over
            if over > 0 or for_tenant is None or index == for_tenant:
                rank = over / ledger.tenant.weight, index == for_tenant
                if found is None or rank > most:
                    found, most = index, rank
        return found


class TenantHitCounts(HitCounts):
    """Hits since the cache was made, also of each tenant."""

    def __init__(self, tree: Tree, tenants: Sequence[Tenant]) -> None:
        HitCounts.__init__(self, tree)
        self._names = [each.name for each in tenants]
        self._tokens = [TenantTokens(0, 0, 0, 0, 0) for _ in self._names]

    def count(self, request: Request) -> Loaded:
        """A request is admitted; see `HitCounts`."""
        loaded = HitCounts.count(self, request)
        at = request.root.tenant
        admitted, asked, device, host, storage = self._tokens[at]
        if request.continues:
            self._tokens[at] = TenantTokens(admitted + 1, asked, device, host, storage)
            return loaded
        behind, brought = request.anchor_tokens - request.device_tokens, request.storage_tokens
        self._tokens[at] = TenantTokens(
            admitted + 1,
            asked + request.prompt,
            device + request.device_tokens,
            host + behind - brought,
            storage + brought,
        )
        return loaded

    def of_tenants(self) -> dict[str, TenantStats]:
        """The tenants' hits and slots by name."""
        found = {}
        for index, (name, tokens) in enumerate(zip(self._names, self._tokens)):
            device: dict[str, PoolShare] = {}
            host: dict[str, PoolShare] = {}
            for component in self._tree.components:
                pools = (device, component.devices[index]), (host, component.hosts[index])
                for of_tier, ledger in pools:
                    if isinstance(ledger, TenantLedger):
                        of_tier[component.name] = ledger.share()
            found[name] = TenantStats(tokens, device, host)
        return found
