"""Priorities and times to live: levels of candidates above what a policy orders.

A use may carry a `Retention`. Its stamp leads to it, so data has the retention of its last use, and
a parent inherits it with the stamp. From the first retention on, every order of candidates is
wrapped (`Levels`): data whose time is over leaves first, then the lowest priority; within a level
the policy's own order decides. Until then nothing is wrapped and nothing is looked up.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from functools import partial
from heapq import heapify, heappop, heappush
from typing import Any, Final, NamedTuple

from kvgraft.policies.policy import CLASS_BITS, Order
from kvgraft.tree.ledger import PoolBooks
from kvgraft.tree.tenants import TenantOrders
from kvgraft.tree.tree import EXPIRED, Tree

FEWEST_RETENTIONS: Final = 1024
"""Uses with retentions from which on those that no data is of any more are forgotten."""


class Retention(NamedTuple):
    """How long a use's data is to be kept, against other data.

    Attributes:
        priority: data of a lower one leaves first; 0 for data without a retention.
        until_s: when its time is over, in seconds of the clock; None for never.
    """

    priority: int
    until_s: float | None = None


class Lifetimes:
    """The retentions of one tree's data, and the time.

    Attributes:
        now_s: the clock, read when a request begins or ends and at every poll: while room is made
            it stands still.
    """

    def __init__(self, tree: Tree, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._clock = clock
        self._retentions: dict[int, Retention] = {}
        self._most = FEWEST_RETENTIONS
        self.now_s = clock()

    def read_clock(self) -> None:
        """Time goes on."""
        self.now_s = self._clock()

    def note(self, stamp: int, retention: Retention) -> None:
        """A use has a retention; O(1), amortised over the data there is."""
        self._retentions[stamp >> CLASS_BITS] = retention
        if len(self._retentions) > self._most:
            self._forget()

    def of(self, stamp: int) -> Retention | None:
        """The retention of the use that a stamp is of; None if it has none."""
        return self._retentions.get(stamp >> CLASS_BITS)

    def level(self, stamp: int) -> int:
        """The level of data with a stamp: its priority, or `EXPIRED`."""
        retention = self.of(stamp)
        if retention is None:
            return 0
        return EXPIRED if self.is_over(retention) else retention.priority

    def is_over(self, retention: Retention) -> bool:
        """Whether its time is over."""
        return retention.until_s is not None and retention.until_s <= self.now_s

    def describe(self, retention: Retention) -> str:
        """When its time is over, in words; empty if never."""
        if retention.until_s is None:
            return ""
        left_s = retention.until_s - self.now_s
        return f"expires in {left_s:.3g} s" if left_s > 0 else "expired"

    def _forget(self) -> None:
        """Forget retentions of uses that no data and no candidate is of."""
        tree = self._tree
        used = {cell.stamp >> CLASS_BITS for node in tree.nodes() for cell in node.cells}
        for component in tree.components:
            for order in (component.device_queue, component.host_queue):
                used.update(stamp >> CLASS_BITS for stamp, _ in order)
        used.add(tree.clock >> CLASS_BITS)
        self._retentions = {use: each for use, each in self._retentions.items() if use in used}
        self._most = max(FEWEST_RETENTIONS, 2 * len(self._retentions))


class Levels:
    """One pool's candidates by level, each level as the policy orders it.

    An entry with a time to live waits in its level's order like any other. When its time is over
    it goes first; the level's order then has an entry that counts no more, see `_void`.

    Args:
        first: the order that the pool had; it goes on as level 0.
        lifetimes: the retentions.
        make: makes the order of another level.
    """

    def __init__(self, first: Order, lifetimes: Lifetimes, make: Callable[[], Order]) -> None:
        self._lifetimes = lifetimes
        self._make = make
        self._orders: dict[int, Order] = {0: first}
        self._levels = [0]
        self._timed: dict[Any, int] = {}
        """Candidates whose time is not over yet, with the stamps they were entered with."""
        self._by_time: list[tuple[float, int, Any]] = []
        self._expired: list[tuple[int, Any]] = []
        self._void: set[Any] = set()
        """Nodes that expired and left, and are in their level's order still."""

    def push(self, stamp: int, node: Any) -> None:
        """Enter a candidate at its level."""
        if node in self._void:
            self.keep(lambda each: True)
        retention = self._lifetimes.of(stamp)
        level = 0 if retention is None else retention.priority
        order = self._orders.get(level)
        if order is None:
            order = self._orders[level] = self._make()
            insort(self._levels, level)
        order.push(stamp, node)
        if retention is not None and retention.until_s is not None:
            self._timed[node] = stamp
            heappush(self._by_time, (retention.until_s, stamp, node))

    def pop(self) -> tuple[int, Any] | None:
        """Take the next victim: the longest unused whose time is over, else of the lowest level."""
        self._expire()
        if self._expired:
            entry = heappop(self._expired)
            self._void.add(entry[1])
            return entry
        for level in self._levels:
            order = self._orders[level]
            while (taken := order.pop()) is not None:
                if taken[1] in self._void:
                    self._void.discard(taken[1])
                    continue
                self._timed.pop(taken[1], None)
                return taken
        return None

    def _expire(self) -> None:
        """Find the entries whose time is over by now."""
        while self._by_time and self._by_time[0][0] <= self._lifetimes.now_s:
            _, stamp, node = heappop(self._by_time)
            if self._timed.get(node) == stamp:
                del self._timed[node]
                heappush(self._expired, (stamp, node))

    def keep(self, wanted: Callable[[Any], object]) -> None:
        """Drop every candidate that is not wanted; O(candidates)."""
        void = self._void
        for order in self._orders.values():
            order.keep(lambda each: each not in void and wanted(each))
        void.clear()
        self._timed = {node: stamp for node, stamp in self._timed.items() if wanted(node)}
        self._expired = [entry for entry in self._expired if wanted(entry[1])]
        heapify(self._expired)
        timed = self._timed
        self._by_time = [each for each in self._by_time if timed.get(each[2]) == each[1]]
        heapify(self._by_time)

    def score(self, stamp: int) -> float | None:
        """The policy's score within the level; None if it has none."""
        retention = self._lifetimes.of(stamp)
        order = self._orders.get(0 if retention is None else retention.priority)
        return (self._orders[0] if order is None else order).score(stamp)

    def __len__(self) -> int:
        return sum(map(len, self._orders.values())) - len(self._void)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Every candidate with its stamp, in no order."""
        for order in self._orders.values():
            for entry in order:
                if entry[1] not in self._void:
                    yield entry


def use_lifetimes(tree: Tree, clock: Callable[[], float]) -> Lifetimes:
    """From here on data has priorities and times; what was entered before has none.

    Tenants keep their own orders, so a priority decides among one tenant's data alone.
    """
    lifetimes = tree.lifetimes = Lifetimes(tree, clock)

    def levels(order: Order, ledger: PoolBooks) -> Order:
        return Levels(order, lifetimes, partial(tree.policy.order, ledger))

    for component in tree.components:
        component.device_queue = _with_levels(component.device_queue, component.device, levels)
        if component.host is not None:
            component.host_queue = _with_levels(component.host_queue, component.host, levels)
    return lifetimes


def _with_levels(
    queue: Order, ledger: PoolBooks, levels: Callable[[Order, PoolBooks], Order]
) -> Order:
    if not isinstance(queue, TenantOrders):
        return levels(queue, ledger)
    queue.wrap(levels)
    return queue
