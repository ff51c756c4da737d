"""An arena: one tier's byte budget, leased to pools extent by extent (K7).

An extent is a 64th of the budget; each pool divides it into whole slots. A move closes the highest
extent of one pool. The policy evicts to make room, live slots move down, the memory goes back to
the system, and another pool opens as much. Slots whose transfer is in flight wait, so a move may
take several steps. Until it ends, the ledger counts the closing slots as promised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvgraft.errors import ConfigError, IntegrityError
from kvgraft.pools.plan import PlannedMemory
from kvgraft.sizes import format_nbytes
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import PoolBooks
from kvgraft.types import Tier
from kvgraft_arena.moving import Mover
from kvgraft_arena.resizing import ResizableAllocator

__all__ = ["EXTENTS", "Arena", "ArenaPool", "Memory"]

logger = logging.getLogger("kvgraft")

EXTENTS = 64
"""Extents of a budget; fewer if its largest slot is larger than one of them."""


class Memory(Protocol):
    """A pool's tensors: a `DevicePool` or a `HostMirror`.

    Attributes:
        planned: the memory that it takes at first.
    """

    @property
    def planned(self) -> PlannedMemory | None: ...

    @property
    def slack_nbytes(self) -> int:
        """Most bytes that it takes beyond those of its slots: devices map whole blocks."""

    def copy_slots(self, source: bytes, target: bytes) -> None:
        """Copy whole slots within the pool."""

    def resize(self, n_slots: int) -> None:
        """Keep memory for the first `n_slots` slots; give the rest back to the system.

        Raises:
            MemoryError: there is not that much.
        """


@dataclass(slots=True, eq=False)
class ArenaPool:
    """A pool that leases extents.

    Attributes:
        component: whose it is.
        ledger: its books.
        allocator: its slots.
        memory: its tensors.
        slot_nbytes: bytes of one slot.
        extent: slots of one extent.
        leased: how many extents it has, one that closes included.
    """

    component: TreeComponent
    ledger: PoolBooks
    allocator: ResizableAllocator
    memory: Memory
    slot_nbytes: int
    extent: int = 0
    leased: int = 0

    @property
    def may_give(self) -> bool:
        """Whether it can give an extent without breaking a promise, and keeps at least one."""
        return self.leased > 1 and self.ledger.headroom >= self.extent


class Arena:
    """The extents of one tier.

    Args:
        tier: DEVICE or HOST.
        nbytes: bytes of the pools that lease them.
        pools: the pools; they are still empty.
        mover: moves slots out of closed extents.

    Attributes:
        extent_nbytes: bytes of an extent; a pool whose slots do not fill it wastes the rest.
        n_extents: how many there are.
        wished: slots by component that a request waits for and that the boundaries leave no room
            for.
        moving: the pools that give and take the extent on its way; None if none is.
        moves: extents that changed hands so far.

    Raises:
        ConfigError: less than an extent for each pool.
    """

    def __init__(self, tier: Tier, nbytes: int, pools: Sequence[ArenaPool], mover: Mover) -> None:
        self.tier = tier
        self.pools = tuple(pools)
        self.by_name = {pool.component.name: pool for pool in pools}
        self.mover = mover
        largest = max(pool.slot_nbytes for pool in pools)
        self.extent_nbytes = max(nbytes // EXTENTS, largest)
        self.n_extents = nbytes // self.extent_nbytes
        self.moving: tuple[ArenaPool, ArenaPool] | None = None
        self.moves = 0
        self.wished: Mapping[str, int] | None = None
        for pool in pools:
            pool.extent = self.extent_nbytes // pool.slot_nbytes
        self._share_out(nbytes)

    def _share_out(self, nbytes: int) -> None:
        """Whole extents for all pools, near their sizes; the first one takes what is left."""
        for pool in self.pools:
            pool.leased = max(1, pool.allocator.capacity // pool.extent)
        first = self.pools[0]
        first.leased += max(0, self.n_extents - sum(pool.leased for pool in self.pools))
        while sum(pool.leased for pool in self.pools) > self.n_extents:
            largest = max(self.pools, key=lambda pool: pool.leased)
            if largest.leased == 1:
                raise ConfigError(
                    f"setting {self.tier.value}_memory: {format_nbytes(nbytes)} for "
                    f"{len(self.pools)} pools make {self.n_extents} extents of "
                    f"{format_nbytes(self.extent_nbytes)}, the largest slot; give "
                    f"{format_nbytes(self.extent_nbytes * len(self.pools))} or more"
                )
            largest.leased -= 1
        for pool in sorted(self.pools, key=_growth):
            allocator, n_slots = pool.allocator, pool.leased * pool.extent
            if n_slots < allocator.end:
                allocator.close(n_slots)
            else:
                allocator.grow(n_slots - allocator.end)
            try:
                pool.memory.resize(n_slots)
            except MemoryError as error:
                raise ConfigError(f"{error}; lower {self.tier.value}_memory") from error

    def begin(self, giver: ArenaPool, taker: ArenaPool) -> bool:
        """Begin to move an extent; whether it moves, now or as transfers end (K7)."""
        if self.moving is not None or giver is taker or not giver.may_give:
            return False
        giver.allocator.close(giver.allocator.end - giver.extent)
        self.moving = giver, taker
        self.step()
        return True

    def step(self) -> None:
        """Go on with the extent that is on its way."""
        if self.moving is None:
            return
        giver, taker = self.moving
        if giver.allocator.closing:
            self.mover.empty(self.tier, giver)
        if giver.allocator.closing:
            return
        giver.memory.resize(giver.allocator.end)
        try:
            taker.memory.resize(taker.allocator.end + taker.extent)
        except MemoryError as error:  # blocks of the device are coarser than slots
            logger.warning("%s; the pool of %s stays as it is", error, taker.component.name)
            taker.memory.resize(taker.allocator.end)
            giver.memory.resize(giver.allocator.end + giver.extent)
            taker, self.wished = giver, None
        giver.leased -= 1
        taker.allocator.grow(taker.extent)
        taker.leased += 1
        self.moving = None
        self.moves += taker is not giver

    # -- requests that need another boundary

    @property
    def is_pending(self) -> bool:
        """Whether a pool is to get memory of another."""
        return self.moving is not None or self.wished is not None

    def could_hold(self, needs: Mapping[str, int]) -> bool:
        """Whether there are extents for so many slots of each pool, at once."""
        return sum(map(_extents, self.pools, self._slots(needs))) <= self.n_extents

    def wish(self, needs: Mapping[str, int]) -> None:
        """Ask that pools grow to `needs`, where they can; the first wish is served first (A8)."""
        if self.wished is None and self.could_hold(needs) and self._short(needs) is not None:
            self.wished = needs

    def serve(self) -> None:
        """Move extents to the pools that a request waits for, as far as others can give now."""
        while self.wished is not None and self.moving is None:
            taker = self._short(self.wished)
            if taker is None:
                self.wished = None
                return
            spare = [
                (pool.ledger.headroom // pool.extent, -pool.component.index, pool)
                for pool, slots in zip(self.pools, self._slots(self.wished))
                if pool.leased > _extents(pool, slots) and pool.may_give
            ]
            if not spare or not self.begin(max(spare)[2], taker):
                return

    def _short(self, needs: Mapping[str, int]) -> ArenaPool | None:
        """The first pool that is smaller than that."""
        for pool, slots in zip(self.pools, self._slots(needs)):
            if pool.leased < _extents(pool, slots):
                return pool
        return None

    def _slots(self, needs: Mapping[str, int]) -> list[int]:
        return [needs.get(pool.component.name, 0) for pool in self.pools]

    def check(self) -> None:
        """Raise `IntegrityError` unless every extent is leased once, whole (K7)."""
        leased = sum(pool.leased for pool in self.pools)
        if leased != self.n_extents:
            raise IntegrityError(
                "K7", None, f"{leased} {self.tier.value} extents are leased of {self.n_extents}"
            )
        giver = self.moving[0] if self.moving is not None else None
        for pool in self.pools:
            extents = pool.leased - (pool is giver)
            stays = pool is not giver and pool.allocator.closing
            if pool.allocator.end != extents * pool.extent or stays:
                raise IntegrityError(
                    "K7",
                    pool.component.name,
                    f"{pool.allocator.end} {self.tier.value} slots are open, {extents} extents "
                    f"of {pool.extent} are leased; {pool.allocator.closing} closed ones are in "
                    "use",
                )


def _extents(pool: ArenaPool, n_slots: int) -> int:
    """The fewest extents that hold so many slots."""
    return max(1, -(-n_slots // pool.extent))


def _growth(pool: ArenaPool) -> int:
    """The slots that its pool lacks, as a sort key: pools with too many come first."""
    return pool.leased * pool.extent - pool.allocator.end
