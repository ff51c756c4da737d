"""Tenants that share pools, as the model follows them (K4, K5, K6)."""

from __future__ import annotations

from kvgraft_testing.machine.brute_force import BruteForce, Gone
from kvgraft_testing.machine.judging import Judge
from kvgraft_testing.machine.observing import NOBODY, Snapshot
from kvgraft_testing.machine.tiers import TierChange

__all__ = ["check_reserved", "check_taken"]


def check_reserved(judge: Judge, now: Snapshot) -> None:
    """Running requests, pins and promises leave every other tenant its guarantee (K4, K6).

    Slots being demoted do not count: no promise waits for their copies (A7).
    """
    for (name, tier), shares in now.shares.items():
        cached = _cached(now, name, tier, len(shares))
        if cached != [each.cached for each in shares]:
            said = f"{tier}: data of {cached} slots is the tenants', their books say {shares}"
            judge.fail("K4", name, said)
        kept = sum(each.claim for each in shares)
        capacity = now.books[name, tier].capacity
        if kept > capacity:
            said = f"{tier}: committed and guaranteed are {kept} slots of {capacity}: {shares}"
            judge.fail("K4", name, said)
        for each in shares:
            if each.used > each.limit:
                judge.fail("K5", name, f"{tier}: a tenant is above its limit: {each}")


def _cached(now: Snapshot, name: str, tier: str, n_tenants: int) -> list[int]:
    """Slots of data in the tree, by tenant of its namespace."""
    held = now.held[name]
    found = [0] * n_tenants
    for (namespace, _), slots in (held.device if tier == "device" else held.host).items():
        found[now.tenant_of(namespace)] += len(slots)
    return found


def check_taken(
    judge: Judge, model: BruteForce, before: Snapshot, after: Snapshot, asks: object
) -> None:
    """A request evicted no more of another tenant's data than that one had borrowed (K4).

    Data that leaves DEVICE for HOST takes its owner's place there, so on HOST this is checked only
    if nothing left DEVICE.
    """
    if not before.shares or asks is NOBODY:
        return
    devices, hosts = (TierChange(model, before, after, tier) for tier in ("device", "host"))
    for change in (devices, hosts):
        if change is hosts and any(devices.lost.values()):
            continue
        lost = {name: _lost(change, name) for name in change.parts}
        for name, by_tenant in lost.items():
            _check_component(judge, change, name, by_tenant, lost, asks)


def _lost(change: TierChange, name: str) -> dict[int, int]:
    """Slots of a component that left the tier, by tenant; cleared data is nobody's."""
    part, of = change.parts[name], change.before.tenant_of
    lost: dict[int, int] = {}
    for namespace, _ in change.lost[name]:
        if not isinstance(namespace, Gone):
            n_slots = 1 if part.is_state else part.slots_per_page
            lost[of(namespace)] = lost.get(of(namespace), 0) + n_slots
    return lost


def _check_component(
    judge: Judge,
    change: TierChange,
    name: str,
    by_tenant: dict[int, int],
    lost: dict[str, dict[int, int]],
    asks: object,
) -> None:
    shares, tier = change.before.shares.get((name, change.tier), ()), change.tier
    for_tenant = change.before.tenant_of(asks)
    for tenant, n_slots in by_tenant.items():
        if tenant == for_tenant or any(
            tenant in lost[other]
            for other, part in change.parts.items()
            if other != name and change.model.contains(part, change.parts[name])
        ):
            continue  # its own, or what hung from wider data that left
        over = shares[tenant].over
        if change.parts[name].home_is_host:  # what leaves HOST leaves DEVICE with it
            over = max(over, change.before.shares[name, "host"][tenant].over)
        if n_slots > max(0, over):
            judge.fail(
                "K4",
                name,
                f"{n_slots} slots of tenant {tenant} left {tier} for a request of tenant "
                f"{for_tenant}, it had borrowed {over}: {shares}",
            )
