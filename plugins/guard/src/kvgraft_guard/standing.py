"""Checks that hold after every operation (T8, T9, A12, I2, B3, R2, H8, L1, M7)."""

from __future__ import annotations

from typing import NoReturn

from kvgraft.errors import ContractViolation
from kvgraft.requests.request import Request
from kvgraft.types import Tier
from kvgraft_guard.books import EVICTABLE, PINNED, PRIVATE, PROMISED, Counts, Reading
from kvgraft_guard.integrity import overdrawn
from kvgraft_guard.leases import Moment
from kvgraft_guard.pins import Pinning
from kvgraft_guard.watched import Watched

__all__ = ["Standing"]

MOVES_MEMORY = frozenset({"poll", "move_memory"})
"""Operations in which the boundary between two pools may move."""

BRINGS_DATA = frozenset({"poll", "drain", "checkpoint", "finish"})
"""Operations in which data may arrive in the tree: acknowledged transfers, inserts."""

HANDS_OVER = frozenset({"computed", "allocate", "allocate_at"})
"""Operations in which a request's own slots may become the tree's (I9)."""

KEEPS_PROMISES = frozenset(
    {"begin", "next_chunk", "evict", "poll", "drain", "move_memory", "clear"}
    | {"pin", "unpin", "unpin_all"}
)
"""Operations that change no promise and no request's slots."""

LEASES_EVERY = 4
"""Operations with evictions between two checks of leases."""

LEASES_AT_A_TIME = 2
"""Requests whose leases are checked then, besides that of the operation."""


class Standing:
    """Checks two readings of the books of one cache."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.cache = watched.cache
        self.books = watched.books
        self._ends = [pool.ledger.allocator.end for pool in self.books.pools]
        self._queues = watched.queues
        self._evicting = 0
        self._pinning = Pinning(watched)
        self._next_lease = 0

    def check(self, name: str, was: Reading, now: Reading) -> None:
        """Compare the pools whose books changed; O(pools)."""
        if self.cache.arenas is not None:
            self._check_boundaries(name)
        nobody = not self.cache.requests
        if was is now and not nobody:
            return
        self.watched.rooms.tenancy.check_standing(name)
        tier = self.cache.storage
        idle = not any(self._queues) and not (tier and tier.n_in_flight)
        for at, (before, after) in enumerate(zip(was.counts, now.counts)):
            if before != after:
                self._check_change(at, name, was, now)
            _, _, pinned, private, in_flight, promised = after
            if idle and in_flight:
                raise ContractViolation(
                    "R2",
                    self.books.pools[at].component,
                    self._left_over(at, name, "in flight", in_flight),
                )
            if nobody and at < self.books.n_device:
                private -= self.cache.engine_slots.n_taken(self.books.pools[at].component)
            if nobody and (private or promised):
                raise ContractViolation(
                    "H8",
                    self.books.pools[at].component,
                    self._left_over(at, name, "private or promised", private + promised),
                )
            kept = tier and self.books.pools[at].ledger.tier is Tier.HOST and tier.receipts()
            if nobody and idle and pinned and not self.cache.pins and not kept:
                raise ContractViolation(
                    "L1",
                    self.books.pools[at].component,
                    self._left_over(at, name, "pinned", pinned),
                )

    def _check_boundaries(self, name: str) -> None:
        """Boundaries move in two operations, by whole extents (K7).

        Where not every operation is looked at, they may have moved before this one.
        """
        ends = [pool.ledger.allocator.end for pool in self.books.pools]
        if ends == self._ends:
            return
        arenas = self.cache.arenas
        assert arenas is not None
        for pool, before, after in zip(self.books.pools, self._ends, ends):
            extent = arenas.extent_of(pool.component, pool.ledger.tier)
            if before == after:
                continue
            unasked = name not in MOVES_MEMORY and self.watched.shares.follows
            if unasked or not extent or (after - before) % extent:
                raise ContractViolation(
                    "K7",
                    pool.component,
                    f"{name} changed the {pool.name} pool from {before} to {after} slots, with "
                    f"extents of {extent}",
                )
        arenas.check()
        self._ends = ends

    def _check_change(self, at: int, name: str, was: Reading, now: Reading) -> None:
        """One pool's books changed: they balance, and every moved slot is accounted for."""
        before, after = was.counts[at], now.counts[at]
        free, evictable, pinned, private, in_flight, promised = after
        total = free + evictable + pinned + private + in_flight
        allocator = self.books.pools[at].ledger.allocator
        # One negative term makes the union negative.
        negative = (allocator.n_free | evictable | pinned | private | in_flight | promised) < 0
        if negative or total != allocator.end:
            self._raise_unbalanced(at, name)
        if free + evictable < promised:
            self._check_headroom(at, name)
        if at < self.books.n_tree:
            moved = evictable + pinned - before[EVICTABLE] - before[PINNED]
            left, then = now.left[at], was.left[at]
            if left != then:
                moved += sum(left) - sum(then)
            if moved:
                self._check_moved(at, name, moved)
        if name in KEEPS_PROMISES:
            self._check_kept(at, name, before, after)

    def check_balance(self, name: str, now: Reading) -> None:
        """Every ledger's equation (T8)."""
        for at, counts in enumerate(now.counts):
            allocator = self.books.pools[at].ledger.allocator
            negative = min(allocator.n_free, *counts[1:]) < 0
            if sum(counts[:PROMISED]) != allocator.end or negative:
                self._raise_unbalanced(at, name)

    def _raise_unbalanced(self, at: int, name: str) -> NoReturn:
        pool = self.books.pools[at]
        raise ContractViolation(
            "T8",
            pool.component,
            f"{pool.name} ledger does not balance after {name}: {pool.ledger.equation()}, "
            f"promised({pool.ledger.promised})",
        )

    def _check_headroom(self, at: int, name: str) -> None:
        """Promises exceed the slots left."""
        pool = self.books.pools[at]
        ledger = pool.ledger
        if ledger.headroom < 0:
            raise ContractViolation(
                "A12",
                pool.component,
                f"{overdrawn(ledger)} after {name}",
            )

    def _check_moved(self, at: int, name: str, moved: int) -> None:
        """The tree's data leaves as evictions (I2) and arrives by inserts and transfers (B3)."""
        pool = self.books.pools[at]
        if moved < 0:
            raise ContractViolation(
                "I2",
                pool.component,
                f"{-moved} slots left the tree's {pool.name} pool in {name} without being evicted",
            )
        ends_backups = name in self.watched.ends_backups
        own = pool.name == "device" or pool.tree_component.home_is_host
        handed_over = name in HANDS_OVER and own
        if (
            name not in BRINGS_DATA
            and not handed_over
            and not (ends_backups and pool.name == "host")
        ):
            raise ContractViolation(
                "B3",
                pool.component,
                f"{moved} slots came to the tree's {pool.name} pool in {name}, which takes in no "
                "transfer and inserts nothing",
            )

    def _check_kept(self, at: int, name: str, before: Counts, after: Counts) -> None:
        pool = self.books.pools[at]
        if before[PROMISED] != after[PROMISED]:
            raise ContractViolation(
                "A12",
                pool.component,
                f"{name} changed the promises of the {pool.name} pool from {before[PROMISED]} to "
                f"{after[PROMISED]}",
            )
        if before[PRIVATE] != after[PRIVATE]:
            raise ContractViolation(
                "T9",
                pool.component,
                f"{name} changed the {pool.name} slots of requests from {before[PRIVATE]} to "
                f"{after[PRIVATE]}",
            )

    def _left_over(self, at: int, name: str, what: str, n_slots: int) -> str:
        return (
            f"{n_slots} {self.books.pools[at].name} slots are {what} after {name}; there are "
            f"{len(self.cache.requests)} requests and {self.cache.journal.n_in_flight} transfers"
        )

    def check_losses(self, name: str, request: Request | None, was: Reading, now: Reading) -> None:
        """Where something was evicted, room was made for it (E2), and no lease lost it (M7)."""
        if was is now or was.left == now.left:
            return
        self.watched.rooms.check_operation(name, was, now)
        self._evicting += 1
        if self._evicting % LEASES_EVERY != 1:
            return
        pins = list(self.cache.pins)
        if pins:
            self._pinning.check(pins[self._evicting % len(pins)])
        requests = list(self.cache.requests.values())
        leases = self.watched.leases
        if request is not None and self.cache.requests.get(id(request)) is request:
            leases.check(request, Moment.HELD)
        for _ in range(min(LEASES_AT_A_TIME, len(requests))):
            self._next_lease = (self._next_lease + 1) % len(requests)
            if requests[self._next_lease] is not request:
                leases.check(requests[self._next_lease], Moment.HELD)
