"""Priorities and times to live: levels of candidates above what a policy orders.

A use may carry a `Retention`, found by its stamp. So data has the retention of its last use, and a
parent inherits it with the stamp. Expired data leaves first, then the lowest priority; within a
level the policy's own order decides, see `kvgraft.tree.component`. Until the first retention
nothing is looked up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvgraft.errors import ConfigError
from kvgraft.policies.policy import use_of
from kvgraft.policies.recency import RecencyQueue
from kvgraft.requests.request import Request
from kvgraft.tree.component import EXPIRED, Candidates
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree

__all__ = ["Lifetimes", "RequestedRetention", "Retention", "Retentions"]

FEWEST_RETENTIONS: Final = 1024
"""Uses with retentions from which on those without data are forgotten."""


def expect_priority(call: str, priority: object) -> None:
    """Refuse a priority that is none.

    Raises:
        ConfigError: it is no whole number, or too large.
    """
    if type(priority) is not int or abs(priority) > MOST_PRIORITY:
        raise ConfigError(
            f"{call}: priority {priority!r:.40}; give a whole number from -{MOST_PRIORITY} to "
            f"{MOST_PRIORITY}"
        )


def expect_ttl(name: str, ttl_s: Any) -> None:
    """Refuse a time to live that is none.

    Raises:
        ConfigError: it is no number of seconds, below 0 or too large.
    """
    if type(ttl_s) not in (int, float) or not 0 <= ttl_s <= MOST_TTL_S:
        raise ConfigError(f"{name} {ttl_s!r:.70}; give seconds, 0 or more")


class Retention(NamedTuple):
    """How long a use's data is to be kept, against other data.

    Attributes:
        priority: data of a lower one leaves first; 0 for data without a retention.
        until_s: when it expires, in seconds of the clock; None for never.
    """

    priority: int
    until_s: float | None = None


class Lifetimes:
    """The retentions of one tree's data, and the time.

    Attributes:
        now_s: the clock, read when a request begins or ends and at every poll, but not during an
            eviction.
    """

    def __init__(self, tree: Tree, clock: Callable[[], float]) -> None:
        self._tree = tree
        self._clock = clock
        self._retentions: dict[int, Retention] = {}
        self._most = FEWEST_RETENTIONS
        self._by_time: dict[tuple[Candidates, int], RecencyQueue] = defaultdict(RecencyQueue)
        """By pool and tenant, candidates that have a time, in the order in which it is over."""
        self.now_s = clock()

    def read_clock(self) -> None:
        """Read the clock; time never goes back."""
        self.now_s = max(self.now_s, self._clock())

    def note(self, stamp: int, retention: Retention) -> None:
        """Note a use's retention; O(1), amortised over all data."""
        self._retentions[use_of(stamp)] = retention
        if len(self._retentions) > self._most:
            self._forget()

    def of(self, stamp: int) -> Retention | None:
        """The retention of the use with this stamp; None if it has none."""
        return self._retentions.get(use_of(stamp))

    def level(self, stamp: int) -> int:
        """The level of data with a stamp: its priority, or `EXPIRED`."""
        retention = self.of(stamp)
        if retention is None:
            return 0
        return EXPIRED if self.is_over(retention) else retention.priority

    def priority(self, stamp: int) -> int:
        """The priority of data with a stamp, even if it has expired."""
        retention = self.of(stamp)
        return 0 if retention is None else retention.priority

    def is_over(self, retention: Retention) -> bool:
        """Whether it has expired."""
        return retention.until_s is not None and retention.until_s <= self.now_s

    # -- candidates by the end of their time: each is in its order by priority as well

    def entered(self, candidates: Candidates, node: Node, stamp: int) -> None:
        """A pool has one more candidate."""
        until = self._until(stamp)
        if until is not None:
            self._by_time[candidates, node.tenant].push(until, node)

    def left(self, candidates: Candidates, node: Node, stamp: int) -> None:
        """A node that was entered with this stamp is no longer a candidate."""
        until = self._until(stamp)
        if until is not None:
            self._by_time[candidates, node.tenant].withdraw(until, node)

    def over(self, candidates: Candidates, tenant: int) -> Node | None:
        """A tenant's candidate that expired first; None if none has."""
        entry = self._by_time[candidates, tenant].entry(0, 0)
        if entry is None:
            return None
        node: Node = entry[1]
        return node if self.level(node.cells[candidates.index].stamp) == EXPIRED else None

    def _until(self, stamp: int) -> int | None:
        """Orders data by the end of its time, then by its last use; None if it has no time."""
        retention = self.of(stamp)
        if retention is None or retention.until_s is None:
            return None
        return (round(min(retention.until_s, 1e15) * 1e9) << 64) + stamp

    def describe(self, retention: Retention) -> str:
        """When it expires, in words; empty if never."""
        if retention.until_s is None:
            return ""
        left_s = retention.until_s - self.now_s
        return f"expires in {left_s:.3g} s" if left_s > 0 else "expired"

    def _forget(self) -> None:
        """Forget retentions of uses that no data is of."""
        tree = self._tree
        used = {use_of(cell.stamp) for node in tree.nodes() for cell in node.cells}
        used.add(use_of(tree.clock))
        self._retentions = {use: each for use, each in self._retentions.items() if use in used}
        self._most = max(FEWEST_RETENTIONS, 2 * len(self._retentions))


MOST_TTL_S: Final = 1e12
"""Some 30,000 years."""

MOST_PRIORITY: Final = 8
"""Priorities are from -8 to 8; each in use costs an order of candidates per pool."""


class RequestedRetention(NamedTuple):
    """The retention that an engine requests for a request's data.

    Attributes:
        priority: data of a lower one leaves first.
        ttl_s: seconds after its use until it expires.
    """

    priority: int = 0
    ttl_s: float | None = None


class Retentions:
    """Sets how long requests' data is kept; does nothing until a request gives a retention.

    Args:
        tree: stamps the data that requests use.
        clock: monotonic, in seconds; of several ranks the same.
    """

    def __init__(self, tree: Tree, clock: Callable[[], float]) -> None:
        self.tree = tree
        self.clock = clock

    @staticmethod
    def ask(call: str, request: Request, priority: Any, ttl_s: Any) -> None:
        """Note a priority and a time to live; None leaves one unchanged.

        Raises:
            ConfigError: an impossible priority or time; nothing was noted.
        """
        wanted = request.requested_retention or RequestedRetention()
        if priority is not None:
            expect_priority(call, priority)
            wanted = wanted._replace(priority=priority)
        if ttl_s is not None:
            expect_ttl(f"{call}: ttl_s", ttl_s)
            wanted = wanted._replace(ttl_s=float(ttl_s))
        request.requested_retention = wanted

    def used(self, request: Request) -> None:
        """Give the requested retention to all data that the request uses from now on."""
        lifetimes = self.tree.lifetimes
        if lifetimes is None:
            lifetimes = self.tree.lifetimes = Lifetimes(self.tree, self.clock)
        lifetimes.read_clock()
        if request.requested_retention is not None:
            priority, ttl_s = request.requested_retention
            until_s = None if ttl_s is None else lifetimes.now_s + ttl_s
            request.use_retention = Retention(priority, until_s)
        self.tree.use_class, self.tree.use_retention = request.use_class, request.use_retention
