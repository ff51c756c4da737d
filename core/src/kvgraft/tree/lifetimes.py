"""Priorities and times to live: levels of candidates above what a policy orders.

A use may carry a `Retention`. Its stamp leads to it, so data has the retention of its last use, and
a parent inherits it with the stamp. Data whose time is over leaves first, then the lowest priority;
within a level the policy's own order decides, see `kvgraft.tree.component`. Until the first
retention nothing is looked up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from kvgraft.policies.policy import CLASS_BITS
from kvgraft.tree.component import EXPIRED
from kvgraft.tree.tree import Tree

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
        """Time goes on, never back."""
        self.now_s = max(self.now_s, self._clock())

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

    def priority(self, stamp: int) -> int:
        """The priority of data with a stamp, whether its time is over or not."""
        retention = self.of(stamp)
        return 0 if retention is None else retention.priority

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
        """Forget retentions of uses that no data is of."""
        tree = self._tree
        used = {cell.stamp >> CLASS_BITS for node in tree.nodes() for cell in node.cells}
        used.add(tree.clock >> CLASS_BITS)
        self._retentions = {use: each for use, each in self._retentions.items() if use in used}
        self._most = max(FEWEST_RETENTIONS, 2 * len(self._retentions))
