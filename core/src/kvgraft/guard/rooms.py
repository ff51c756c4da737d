"""What leaves a pool when room is made (E1, E2, E3, E5, E6, L5, R3).

Everything that is evicted goes through `kvgraft.room.Room`, one pool and one target at a time. So
each call can be compared with what the operation needs and with what the books said before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft.guard.books import (
    EVICTABLE,
    FREE,
    IN_FLIGHT,
    PINNED,
    Books,
    Reading,
)
from kvgraft.room import Room
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.track import CAUSES, Track

if TYPE_CHECKING:
    from kvgraft.cache import Cache

__all__ = ["Rooms"]

CASCADE = CAUSES.index("cascade")
OWN = (CAUSES.index("demoted"), CAUSES.index("deleted"))


class Rooms:
    """Watches a cache make room.

    Attributes:
        active: whether an operation is being looked at; set by `expect`, cleared when it is over.
    """

    def __init__(self, cache: Cache, books: Books) -> None:
        self.books = books
        self.tree = cache.tree
        self.active = False
        self.write_back = cache.config.write_policy is WritePolicy.WRITE_BACK
        self._device = range(books.n_device)
        self._host = range(books.n_device, books.n_tree)
        # Under write-back all that leaves with a victim is demoted, whichever pool was short.
        self._own_causes = OWN if not self.write_back else (CAUSES.index("deleted"),)
        self._homes = any(track.home_is_host for track in cache.tree.tracks)
        self._needs: Sequence[int] = ()
        self._host_too = False
        self._loading = False
        self._inside = False
        self._evicted: list[int] | None = None
        self._victims = _Victims()
        self._room = cache.room
        setattr(cache.room, "on_device", self.on_device)  # noqa: B010 - on this instance alone
        setattr(cache.room, "on_host", self.on_host)  # noqa: B010
        self._victims.watch(cache)

    def expect(self, needs: Sequence[int], *, host_too: bool, loading: bool = False) -> None:
        """An operation begins that may make room on DEVICE for `needs`, per component.

        Args:
            needs: slots that must be free for it.
            host_too: whether it may make room on HOST.
            loading: whether it is a load-back, whose shortfalls rule R3 is about.
        """
        self._needs, self._host_too, self._loading = needs, host_too, loading
        self._evicted = None
        self.active = True

    # -- the two ways to make room

    def on_device(self, track: Track, n_slots: int) -> bool:
        """`Room.on_device`, and what it did."""
        if not self.active or n_slots <= track.device.free:
            return Room.on_device(self._room, track, n_slots)
        self._expect_needed(track, n_slots, self._needs[track.index])
        was = self.books.read()
        self._inside = True
        if not self.write_back:
            self._victims.begin(track.device, n_slots, on_device=True)
        try:
            made = Room.on_device(self._room, track, n_slots)
        finally:
            self._inside = False
            self._victims.end()
        now = self.books.read()
        self._note(was, now)
        self._check_outcome(track, track.device, n_slots, made=made)
        self._check_starter(track, self._device, self._own_causes, was, now)
        if not self.write_back:
            self._check_victims(track, track.device, "device", n_slots)
            self._check_cascade(track, self._device, was, now)
            self._check_books(track, was, now)
            if not made and track.device.evictable:
                raise ContractViolation(
                    "E6",
                    track.name,
                    f"making room for {n_slots} slots stopped at free({track.device.free}) with "
                    f"evictable({track.device.evictable}) left",
                )
        return made

    def on_host(self, track: Track, n_slots: int) -> bool:
        """`Room.on_host`, and what it did."""
        ledger = track.host
        if not self.active or ledger is None or n_slots <= ledger.free:
            return Room.on_host(self._room, track, n_slots)
        self._expect_needed(track, n_slots, ledger.capacity + n_slots if self._host_too else 0)
        was = self.books.read()
        inside, self._inside = self._inside, True
        self._victims.begin(ledger, n_slots, on_device=False)
        try:
            made = Room.on_host(self._room, track, n_slots)
        finally:
            self._inside = inside
            self._victims.end()
        now = self.books.read()
        if not inside:
            self._note(was, now)
        self._check_outcome(track, ledger, n_slots, made=made)
        self._check_starter(track, self._host, OWN, was, now)
        self._check_victims(track, ledger, "host", n_slots)
        self._check_cascade(track, self._host, was, now)
        self._check_books(track, was, now)
        if not self._homes:
            self._check_device_alone(track, was, now)
        return made

    # -- one call

    def _expect_needed(self, track: Track, n_slots: int, needed: int) -> None:
        if n_slots <= needed:
            return
        evidence = f"room is made for {n_slots} slots where the operation needs {needed}"
        if self._loading:
            raise ContractViolation("R3", track.name, evidence)
        raise ContractViolation("E2", track.name, evidence)

    def _check_outcome(self, track: Track, ledger: Ledger, n_slots: int, *, made: bool) -> None:
        if made is not (ledger.free >= n_slots):
            raise ContractViolation(
                "E6",
                track.name,
                f"making room for {n_slots} {ledger.tier.value} slots answers {made} with "
                f"free({ledger.free})",
            )

    def _check_starter(
        self, track: Track, tier: range, causes: Sequence[int], was: Reading, now: Reading
    ) -> None:
        """Victims are the short pool's own; what leaves others went along (R3, E2)."""
        for at in tier:
            pool = self.books.pools[at]
            if pool.track is track or was.left[at] == now.left[at]:
                continue
            chosen = sum(now.left[at][cause] - was.left[at][cause] for cause in causes)
            if not chosen:
                continue
            evidence = (
                f"its {pool.name} pool was short and {chosen} slots of {pool.component!r} were "
                f"chosen as victims; {pool.ledger.equation()}"
            )
            if self._loading:
                raise ContractViolation("R3", track.name, evidence)
            raise ContractViolation("E2", track.name, evidence)

    def _check_victims(self, track: Track, ledger: Ledger, tier: str, n_slots: int) -> None:
        """It stopped when there was enough (E2)."""
        if self._victims.beyond is not None:
            raise ContractViolation(
                "E2",
                track.name,
                f"{self._victims.beyond!r} was evicted on {tier} when free was "
                f"{self._victims.enough} already and {n_slots} were needed; free is {ledger.free}",
            )

    def _check_cascade(self, track: Track, tier: range, was: Reading, now: Reading) -> None:
        """Only contained components go along, unless prefix-closed data is gone (E3)."""
        if any(
            _grew(was, now, at) - _cascaded(was, now, at)
            for other in self.tree.everything
            for at in (other.index, self.books.host.get(other.index, other.index))
        ):
            return
        for at in tier:
            pool = self.books.pools[at]
            if pool.track.index not in track.narrower and _cascaded(was, now, at):
                raise ContractViolation(
                    "E3",
                    track.name,
                    f"making room took {_cascaded(was, now, at)} {pool.name} slots of "
                    f"{pool.component!r} along, whose reach is not contained in its own",
                )

    def _check_books(self, track: Track, was: Reading, now: Reading) -> None:
        """What became free was evictable, and is what the counters say (E1, L5, E6)."""
        for at in range(self.books.n_tree):
            before, after = was.counts[at], now.counts[at]
            if before == after:
                continue
            pool = self.books.pools[at]
            where = f"making room for {track.name!r}: {pool.name} pool of {pool.component!r}"
            if before[PINNED] != after[PINNED]:
                raise ContractViolation(
                    "E1",
                    pool.component,
                    f"{where}: pinned went from {before[PINNED]} to {after[PINNED]}",
                )
            if before[IN_FLIGHT] != after[IN_FLIGHT]:
                raise ContractViolation(
                    "L5",
                    pool.component,
                    f"{where}: in flight went from {before[IN_FLIGHT]} to {after[IN_FLIGHT]}",
                )
            freed = after[FREE] - before[FREE]
            lost = before[EVICTABLE] - after[EVICTABLE]
            if not freed == lost == _grew(was, now, at):
                raise ContractViolation(
                    "E6",
                    pool.component,
                    f"{where}: {freed} slots became free, {lost} were evictable, "
                    f"{_grew(was, now, at)} are counted as evicted",
                )

    def _check_device_alone(self, track: Track, was: Reading, now: Reading) -> None:
        """HOST eviction leaves DEVICE alone (E5)."""
        for at in self._device:
            if was.counts[at] != now.counts[at]:
                pool = self.books.pools[at]
                raise ContractViolation(
                    "E5",
                    pool.component,
                    f"making room on HOST for {track.name!r} changed its device pool from "
                    f"{was.counts[at]} to {now.counts[at]} (free, evictable, pinned, private, in "
                    "flight, promised)",
                )

    # -- the operation

    def _note(self, was: Reading, now: Reading) -> None:
        """Add what left in this call to what the operation may have evicted."""
        grown = [_grew(was, now, at) - _cascaded(was, now, at) for at in range(self.books.n_tree)]
        if self._evicted is not None:
            grown = [mine + more for mine, more in zip(self._evicted, grown)]
        self._evicted = grown

    def check_operation(self, name: str, was: Reading, now: Reading) -> None:
        """Nothing was evicted but by making room where it was short (E2)."""
        for at in range(self.books.n_tree):
            grown = _grew(was, now, at) - _cascaded(was, now, at)
            accounted = self._evicted[at] if self._evicted is not None else 0
            if grown != accounted:
                pool = self.books.pools[at]
                raise ContractViolation(
                    "E2",
                    pool.component,
                    f"{grown} slots were evicted from the {pool.name} pool by {name}, {accounted} "
                    f"of them because it was short; {pool.ledger.equation()}",
                )


def _grew(was: Reading, now: Reading, at: int) -> int:
    return sum(now.left[at]) - sum(was.left[at])


def _cascaded(was: Reading, now: Reading, at: int) -> int:
    return now.left[at][CASCADE] - was.left[at][CASCADE]


class _Victims:
    """Which node is being evicted, and whether that was still needed.

    The tree is told of a victim when its cells are gone, and asked to remove it when all that went
    along is; what is freed between the two belongs to it.

    Attributes:
        beyond: the first victim taken when there was enough already.
        enough: what was free then.
    """

    def __init__(self) -> None:
        self.beyond: Node | None = None
        self.enough = 0
        self._free = 0
        self._ledger: Ledger | None = None
        self._target = 0
        self._on_device = False
        self._open: Node | None = None

    def begin(self, ledger: Ledger, target: int, *, on_device: bool) -> None:
        self._ledger, self._target, self._on_device = ledger, target, on_device
        self.beyond, self._free, self._open = None, ledger.free, None

    def end(self) -> None:
        self._ledger = None

    def watch(self, cache: Cache) -> None:
        """Listen to the cache's tree."""
        tree: Any = cache.tree
        sink, drop, remove = tree.sink_device, tree.drop_host, tree.remove_dead

        def sink_device(node: Node, n_cells: int) -> None:
            if self._ledger is not None and self._on_device:
                self._take(node)
            sink(node, n_cells)

        def drop_host(node: Node, track: Track, cause: str) -> None:
            if self._ledger is not None and not self._on_device:
                self._take(node)
            drop(node, track, cause)

        def remove_dead(node: Node) -> None:
            if self._ledger is not None and node is self._open:
                self._open, self._free = None, self._ledger.free
            remove(node)

        tree.sink_device, tree.drop_host, tree.remove_dead = sink_device, drop_host, remove_dead

    def _take(self, node: Node) -> None:
        if self._open is None:
            self._open = node
            if self._free >= self._target and self.beyond is None:
                self.beyond, self.enough = node, self._free
