"""The arenas of a cache: one per tier that has a budget and pools that can share it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvgraft.config import CacheConfig
from kvgraft.errors import ConfigError
from kvgraft.packages.dispatch import Mounted
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import Request
from kvgraft.transfers import Journal
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier
from kvgraft_arena.balance import Balance
from kvgraft_arena.extents import Arena, ArenaPool
from kvgraft_arena.holders import SlotHolders
from kvgraft_arena.moving import Mover
from kvgraft_arena.reserved import can_reserve, reserve
from kvgraft_arena.resizing import MovableLedger, ResizableAllocator, allocator_within
from kvgraft_arena.shadows import SHARE, Shadow, Shadows

__all__ = ["Arenas"]

logger = logging.getLogger("kvgraft")


class Arenas:
    """Moves the boundaries between the pools of one cache.

    A pool's boundary is fixed if its memory belongs to an engine, is page-locked, or is on a device
    that cannot reserve address space; if its component has private pools, copies of its own or its
    home on HOST; and, on HOST, if a store reads it.

    Attributes:
        by_tier: the arenas; none for a tier with fewer than two pools that can share.
        balances: what decides where their boundaries move, in the same order.

    `reserve` makes the memory of such a pool if the device `can_reserve` address space, `allocator`
    its slots, and `ledger` is the class of its ledger.
    """

    ledger = MovableLedger
    allocator = staticmethod(allocator_within)
    can_reserve = staticmethod(can_reserve)
    reserve = staticmethod(reserve)

    def __init__(
        self,
        config: CacheConfig,
        tree: Tree,
        mounted: Sequence[Mounted],
        evictor: Evictor,
        journal: Journal,
        requests: Mapping[int, Request],
    ) -> None:
        self.by_tier: dict[Tier, Arena] = {}
        self.balances: list[Balance] = []
        shadows: dict[tuple[Tier, int], Shadow] = {}
        sharing = {tier: _pools(tier, tree, mounted) for tier in _budgets(config)}
        sizes = [
            (tier, pool.component.index, pool.allocator.limit)
            for tier, pools in sharing.items()
            for pool in pools
        ]
        holders = SlotHolders(sizes)
        self.mover = Mover(evictor, journal, requests, holders, payload=config.payload)
        for tier, nbytes in _budgets(config).items():
            pools = sharing[tier]
            if len(pools) > 1:
                left = nbytes - _fixed_nbytes(tier, pools)
                arena = self.by_tier[tier] = Arena(tier, left, pools, self.mover)
                own = [Shadow(left // SHARE, pool.slot_nbytes) for pool in pools]
                shadows |= {(tier, p.component.index): each for p, each in zip(pools, own)}
                self.balances.append(Balance(arena, own))
            else:
                where = config.device if tier is Tier.DEVICE else "this host"
                logger.warning(
                    "%s_memory: %d of %d pools on %s can share it, so sizes stay as they begin; "
                    "see docs/embedding.md",
                    tier.value,
                    len(pools),
                    len(mounted),
                    where,
                )
        self.shadows = Shadows(tree, shadows)
        if self.by_tier:
            tree.add_observer(holders)
            tree.add_observer(self.shadows)

    def used(self, request: Request) -> None:
        """A request was admitted: its match says which pool is too small."""
        if self.balances:
            self.shadows.used(request)
            for balance in self.balances:
                balance.used()

    def poll(self) -> None:
        """Continue moves, then move extents that a request waits for, then balance."""
        for arena in self.by_tier.values():
            arena.step()
            arena.serve()
        for balance in self.balances:
            balance.step()

    @property
    def n_pending(self) -> int:
        """Pools that wait for memory of others."""
        return sum(arena.is_pending for arena in self.by_tier.values())

    @property
    def moved_slots(self) -> int:
        """Slots that moved so far."""
        return self.mover.moved_slots

    def could_hold(self, name: str, needs: Mapping[str, int]) -> bool:
        """Whether the DEVICE pools of `name` and others could have so many slots each, at once."""
        arena = self.by_tier.get(Tier.DEVICE)
        return arena is not None and name in arena.by_name and arena.could_hold(needs)

    def wish(self, needs: Mapping[str, int]) -> None:
        """A request is deferred: let the DEVICE pools that are too small for it grow (A8)."""
        arena = self.by_tier.get(Tier.DEVICE)
        if arena is not None:
            arena.wish(needs)

    def move(self, giver: str, taker: str, tier: Tier) -> bool:
        """Move an extent from one component's pool to another's; whether it moves.

        Raises:
            ConfigError: no budget on that tier, or a component whose pool has no part in it.
        """
        arena = self.by_tier.get(tier)
        shared = [] if arena is None else list(arena.by_name)
        for name in (giver, taker):
            if arena is None or name not in shared:
                raise ConfigError(
                    f"move_memory: component {name!r} shares no {tier.value} budget; those that do "
                    f"are {', '.join(shared) or 'none'}"
                )
        assert arena is not None
        return arena.begin(arena.by_name[giver], arena.by_name[taker])

    def extent_of(self, name: str, tier: Tier) -> int:
        """Slots of an extent of a component's pool; 0 for a pool that shares no budget."""
        arena = self.by_tier.get(tier)
        return 0 if arena is None or name not in arena.by_name else arena.by_name[name].extent

    def check(self) -> None:
        """Raise `IntegrityError` unless every extent is leased once (K7)."""
        for arena in self.by_tier.values():
            arena.check()


def _budgets(config: CacheConfig) -> dict[Tier, int]:
    budgets = {Tier.DEVICE: config.device_memory, Tier.HOST: config.host_memory}
    return {tier: nbytes for tier, nbytes in budgets.items() if nbytes}


def _pools(tier: Tier, tree: Tree, mounted: Sequence[Mounted]) -> list[ArenaPool]:
    """The pools of a tier whose boundary can move, in the tree's order."""
    found = []
    for component, each in zip(tree.components, mounted):
        own = each.component
        keeps_places = own.private or each.transfer_hooks is not None or component.home_is_host
        pool = own.device if tier is Tier.DEVICE else own.host
        if pool is None or keeps_places or not isinstance(pool.allocator, ResizableAllocator):
            continue
        ledger = component.device if tier is Tier.DEVICE else component.host
        assert ledger is not None
        nbytes = own.device.slot_nbytes if tier is Tier.DEVICE else own.host.slab_nbytes  # type: ignore[union-attr]
        found.append(ArenaPool(component, ledger, pool.allocator, pool, nbytes))
    return found


def _fixed_nbytes(tier: Tier, pools: Sequence[ArenaPool]) -> int:
    """Bytes of a tier's pools with a fixed boundary, and the slack of the others."""
    shared = [pool.memory.planned for pool in pools]
    (plan,) = {id(each.plan): each.plan for each in shared if each is not None}.values()
    slack = sum(pool.memory.slack_nbytes for pool in pools)
    return plan.nbytes(tier) - sum(each.nbytes for each in shared if each is not None) + slack
