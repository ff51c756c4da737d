"""Orders of eviction that the state machine's model knows.

By age, by namespace or priority first, and with times to live.

`density` goes by age until it has learnt something, which the machine's short sequences do not
allow; but it ranks windows and states by the cost of their loss.

The model cannot predict a learning policy from prefixes alone. It can predict one whose classes
depend on the namespace, which shows whether the tree gives every use its class and follows the
policy's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from zlib import crc32

from kvgraft.policies.policy import EvictionPolicy, Hint, Order, Pool, Use, class_of
from kvgraft.policies.recency import LeastRecentlyUsed, RecencyQueue
from kvgraft_density.policy import Density

__all__ = [
    "BY_AGE",
    "BY_AGE_UNLEARNT",
    "BY_NAMESPACE",
    "BY_PRIORITY",
    "BY_TERM",
    "HINTS",
    "Keeping",
]

N_RANKS = 3

HINTS: tuple[Hint | None, ...] = (None, *Hint)
"""An engine's hints; these policies ignore them."""


class Keeping(NamedTuple):
    """A policy as the machine and its model know it.

    Attributes:
        make: makes the policy.
        rank: of a namespace's data; all of a lower one leaves before any of a higher one.
        priority: of requests in a namespace; None if they give none.
        ttl_s: seconds of the machine's clock, one for each call, after which their data expires;
            None for never.
        by_cost: whether it ranks data that not every boundary needs by the cost of its loss, which
            the model does not know.
    """

    make: Callable[[], EvictionPolicy]
    rank: Callable[[object], int]
    priority: Callable[[object], int | None] = lambda namespace: None
    ttl_s: Callable[[object], float | None] = lambda namespace: None
    by_cost: bool = False

    def wanted(self, namespace: object) -> tuple[int | None, float | None]:
        """Priority and time to live of a namespace's requests."""
        return self.priority(namespace), self.ttl_s(namespace)


def _rank(namespace: object) -> int:
    return (crc32(repr(namespace).encode()) >> 3) % N_RANKS


class ByNamespace(LeastRecentlyUsed):
    """The namespace's rank first, then least recently used."""

    name = "by-namespace"
    classifies = True

    def order(self, pool: Pool) -> Order:  # type: ignore[override]
        """A queue for each rank."""
        del pool
        return _ByRank()

    def classify(self, use: Use) -> tuple[int, Any]:
        """The namespace's rank."""
        return _rank(use.namespace), None

    def finished(self, use: Use, stamp: int, hint: Hint | None) -> int:
        """The same."""
        del stamp, hint
        return _rank(use.namespace)

    def describe(self, use_class: int) -> str:
        """The rank in words."""
        return f"rank {use_class}"


class _ByRank:
    def __init__(self) -> None:
        self.ranks = [RecencyQueue() for _ in range(N_RANKS)]

    def push(self, stamp: int, node: Any) -> None:
        self.ranks[class_of(stamp)].push(stamp, node)

    def pop(self) -> tuple[int, Any] | None:
        for queue in self.ranks:
            entry = queue.pop()
            if entry is not None:
                return entry
        return None

    def withdraw(self, stamp: int, node: Any) -> None:
        self.ranks[class_of(stamp)].withdraw(stamp, node)

    def score(self, stamp: int) -> float | None:
        return class_of(stamp)

    def __len__(self) -> int:
        return sum(map(len, self.ranks))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for queue in self.ranks:
            yield from queue


BY_AGE = Keeping(LeastRecentlyUsed, lambda namespace: 0)
BY_AGE_UNLEARNT = Keeping(Density, lambda namespace: 0, by_cost=True)
BY_NAMESPACE = Keeping(ByNamespace, _rank)
BY_PRIORITY = Keeping(LeastRecentlyUsed, _rank, lambda namespace: _rank(namespace) - 1)
BY_TERM = Keeping(
    LeastRecentlyUsed,
    lambda namespace: 0,
    lambda namespace: 1 if _rank(namespace) == 1 else None,  # some requests give no term at all
    lambda namespace: (None, 9.0, 0.0)[_rank(namespace)],
)
