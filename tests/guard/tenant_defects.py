"""A core that lets tenants lose what is theirs."""

from __future__ import annotations

from kvgraft.tree.component import Candidates
from kvgraft_retention.tenants import SharedLedger, TenantLedger

from ..tenants.engine import PAGE, Player
from .defect import breaks
from .scene import Patch

__all__: list[str] = []

TENANTS = {
    "a": {"namespaces": ["a"], "guarantee": 0.5, "limit": 0.75},
    "b": {"namespaces": ["b"], "limit": 0.75},
}


def unminded(ledger: TenantLedger) -> int:
    """All that a tenant has counts as borrowed."""
    return ledger.used - ledger.leaving


def flooded(player: Player, namespaces: str) -> None:
    for number, namespace in enumerate(namespaces):
        start = 1_000 * number
        player.serve(namespace, range(start, start + 7 * PAGE))


@breaks("K4", "full")
def a_guarantee_that_nobody_minds_on_device(put: Patch) -> None:
    player = Player(("full",), TENANTS, host_tokens=0)
    flooded(player, "aa")
    put.setattr(TenantLedger, "over", property(unminded))
    flooded(player, "cbbbb")


@breaks("K4", "full")
def a_guarantee_that_nobody_minds_on_host(put: Patch) -> None:
    player = Player(("full",), TENANTS, device_tokens=64 * PAGE)
    flooded(player, "aa")
    put.setattr(TenantLedger, "over", property(unminded))
    flooded(player, "cbbbb")


@breaks("K5", "full")
def a_victim_of_the_tenant_that_borrowed_least(put: Patch) -> None:
    player = Player(("full",), TENANTS, host_tokens=0)

    def least(pool: SharedLedger, for_tenant: int | None, candidates: Candidates) -> int | None:
        over = [ledger.over for ledger in pool.parts]
        some = [each for each in range(len(over)) if over[each] > 0 and candidates.waits(each)]
        return min(some, key=over.__getitem__, default=None)

    put.setattr(SharedLedger, "giver", least)
    flooded(player, "bbbdcb")


@breaks("K5", "full")
def a_limit_that_nobody_minds(put: Patch) -> None:
    player = Player(("full",), TENANTS)
    put.setattr(TenantLedger, "room", property(lambda self: self.allocator.n_free))
    flooded(player, "bbbbb")


@breaks("K4", "full")
def a_pin_that_takes_of_another_guarantee(put: Patch) -> None:
    player = Player(("full",), TENANTS, host_tokens=0)
    flooded(player, "bbb")
    put.setattr(TenantLedger, "headroom", 1_000)
    for number in range(3):
        start = 1_000 * number
        player.begin("b", [*range(start, start + 7 * PAGE), 1, 2, 3, 4, 5])


@breaks("K4", "full")
def slots_on_their_way_out_that_nobody_claims(put: Patch) -> None:
    player = Player(("full",), TENANTS, host_tokens=0)
    put.setattr(TenantLedger, "claim", property(lambda self: self.guarantee))
    flooded(player, "ab")
