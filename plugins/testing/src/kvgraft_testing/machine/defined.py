"""Numbers that the core derives from its books, compared with their definitions (K4, K5, T7).

Decisions depend on them: the slots that a tenant may get, the tenant that loses data next, and the
level of data with a priority or a time to live. They are checked after every call, so that a wrong
one is found even if no decision depends on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraft.tree.component import Candidates
from kvgraft.types import Tier
from kvgraft_retention.settings import TenantSettings
from kvgraft_retention.tenants import TenantLedger
from kvgraft_testing.machine.brute_force import Gone
from kvgraft_testing.machine.judging import Judge
from kvgraft_testing.machine.observing import Share, Snapshot
from kvgraft_testing.machine.recency import EXPIRED
from kvgraft_testing.machine.tiers import TierChange

if TYPE_CHECKING:
    from kvgraft.cache import Cache
    from kvgraft_testing.machine.bench import Bench

__all__ = ["check_levels", "check_rights"]


def check_rights(judge: Judge, cache: Cache, now: Snapshot) -> None:
    """Tenants' guarantees, limits and borrowed slots are those of their settings and data."""
    names = dict.fromkeys([*cache.config.tenants, "default"])
    settings = [cache.config.tenants.get(name, TenantSettings()) for name in names]
    weights = [each.weight for each in settings]
    for component in cache.tree.components if now.shares else ():
        for tier, ledger in ((Tier.DEVICE, component.device), (Tier.HOST, component.host)):
            if ledger is None:
                continue
            queue = ledger.queue
            name, shares = component.name, now.shares[component.name, tier.value]
            free = now.books[name, tier.value].free
            for at, (share, part) in enumerate(zip(shares, ledger.parts)):
                assert isinstance(part, TenantLedger)
                others = sum(each.claim for each in shares) - share.claim
                headroom = min(ledger.capacity - others, share.limit) - share.committed
                most = ledger.capacity - sum(each.guarantee for each in shares) + share.guarantee
                told = (
                    part.guarantee,
                    part.limit,
                    part.over,
                    part.room,
                    part.headroom,
                    part.ceiling,
                )
                true = (
                    share.guarantee,
                    share.limit,
                    share.over,
                    min(free, share.limit - share.used),
                    headroom,
                    min(share.limit, most),
                )
                if told != true:
                    rule = "K5" if (told[::2], told[5]) == (true[::2], true[5]) else "K4"
                    said = f"{tier.value}: tenant {at} has guarantee, limit, borrowed, room, "
                    said += "headroom and most "
                    judge.fail(rule, name, f"{said}{told}; by its settings it is {true}")
            if component.per_tenant_order:
                _check_giver(judge, cache, queue, (name, tier.value), shares, free, weights)


def _check_giver(
    judge: Judge,
    cache: Cache,
    queue: Candidates,
    where: tuple[str, str],
    shares: tuple[Share, ...],
    free: int,
    weights: list[float],
) -> None:
    """The tenant that borrowed most by its weight gives first; one that asks, its own data (K5)."""
    waiting = [at for at in range(len(shares)) if queue.waits(at)]
    asked = cache.tree.for_tenant
    for for_tenant in (None, *range(len(shares))):
        cache.tree.for_tenant = for_tenant
        try:
            giver = queue.giver()
        finally:
            cache.tree.for_tenant = asked
        if for_tenant is not None and shares[for_tenant].limit - shares[for_tenant].used <= free:
            may = [for_tenant]
        else:
            may = [at for at in waiting if for_tenant in (None, at) or shares[at].over > 0]
            most = max((shares[at].over / weights[at] for at in may), default=0.0)
            may = [at for at in may if shares[at].over / weights[at] == most] or [None]
        if giver not in may and (giver is None or giver in waiting):
            name, tier = where
            said = f"{tier}: tenant {giver} gives up data for {for_tenant}, it was {may}'s turn"
            kept = (
                giver not in (None, for_tenant)
                and for_tenant is not None
                and shares[giver].over <= 0
            )
            judge.fail("K4" if kept else "K5", name, f"{said}: {shares}, weights {weights}")


def check_levels(bench: Bench) -> None:
    """Data has the priority of its last use, until it expires (T7)."""
    cache, now, recency = bench.cache, bench.seen, bench.recency
    if cache.tree.lifetimes is None:
        return
    for component in bench.model.components:
        tier = TierChange(bench.model, now, now, "device")
        for view in tier.candidates(component.name):
            pages = tier.cells_of(view, component.name)
            level = now.held[component.name].levels.get(view.pages[-1])
            if isinstance(view.pages[-1][0], Gone):
                continue
            used = recency.latest(component, pages)
            if level is None or used < 0 or recency.certain(component, "device", pages) != used:
                continue
            levels = {recency.earliest(component, "device", pages)[0]}
            levels.add(recency.last(component, "device", pages)[0])
            if max(level, EXPIRED) not in levels:
                said = f"{view.pages[-1]} has level {level}, its last use gives it {levels}"
                bench.judge.fail("T7", component.name, said)
