"""One guarded cache and the state its checks share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvgraft.cache import Cache
from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import Request
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.operations import Operation
from kvgraft.types import Tier
from kvgraft_guard.books import Books, Reading
from kvgraft_guard.contents import Contents
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.leases import Leases
from kvgraft_guard.matches import Matches
from kvgraft_guard.promises import Promises
from kvgraft_guard.rooms import Rooms
from kvgraft_guard.shares import Shares

__all__ = ["After", "Holdings", "Watched", "holdings"]

After = Callable[[Any, Reading, Reading], None]
"""A check after an operation, of its result and the books before and after it."""

MAKES_ROOM = frozenset(
    {"load_back", "allocate", "allocate_at", "checkpoint", "evict", "move_memory", "take"}
)
"""Operations that evict on DEVICE."""


class Watched:
    """One guarded cache.

    Attributes:
        cache, tree: the guarded cache and its tree.
        books: its ledgers and counters.
        rooms: checks of evictions.
        leases: checks of pinned data.
        hooks: the wrappers around the components' hooks.
        matches: checks of match results.
        operation: the name of the one that is checked, or was last.
        contents: bytes in the pools.
        shares: checks of data that requests own and share.
        promises: checks of demands and promises.
        queues: transfers in flight, by direction.
        policy, write_back: the write policy.
        ends_backups: operations that wait for copies to HOST, and so process transfers: under
            write-back those that make room on DEVICE.
        copies_hits: whether a match may begin backups, such as of evict-first data.
        nothing: no slot of any component.
        states: one slot of each state component.
        filled: the component whose clean reserve is being filled; None if none is.
        homes: whether any component is at home on HOST.
    """

    def __init__(self, cache: Cache, hooks: Sequence[HookGuard]) -> None:
        self.cache = cache
        self.tree = cache.tree
        self.hooks = hooks
        self.matches = Matches(cache, hooks)
        self.shares = Shares(cache, hooks)
        self.contents = Contents(cache)
        self.operation = ""
        self.promises = Promises(cache)
        self.books = Books(cache)
        self.rooms = Rooms(cache, self.books)
        self.leases = Leases(cache)
        self.queues = tuple(cache.journal.queues.values())
        policy = self.policy = cache.config.write_policy
        self.write_back = policy is WritePolicy.WRITE_BACK and cache.backups.enabled
        self.ends_backups = MAKES_ROOM if self.write_back else frozenset()
        self.copies_hits = cache.backups.enabled and not self.write_back
        components = self.tree.components
        self.nothing = (0,) * len(components)
        self.states = tuple(int(component.is_state) for component in components)
        self.filled: TreeComponent | None = None
        self.homes = any(component.home_is_host for component in components)

    def now_s(self) -> float:
        """The time by the clock that the cache was given; 0 while nothing has a time to live."""
        return self.cache.retentions.clock() if self.tree.lifetimes is not None else 0.0

    def check_time(self, name: str, since_s: float) -> None:
        """The time that decides what has expired is no older than the call (T7)."""
        lifetimes = self.tree.lifetimes
        if lifetimes is not None and lifetimes.now_s < since_s:
            raise ContractViolation(
                "T7",
                None,
                f"by the clock it was {since_s:.3f} s when {name} was called; data is taken to be "
                f"expired by {lifetimes.now_s:.3f} s",
            )

    def most_splits(self, boundary: int) -> int | None:
        """Nodes a match of `boundary` pages may split; None where components name their own spans.

        One at the anchor, one at the device anchor, and one where each reach begins and ends.
        """
        if any(each.lock_hooks is not None for each in self.cache.mounted):
            return None
        spans = [len(component.reach_pages.spans(boundary)) for component in self.tree.components]
        return 2 + 2 * sum(spans)

    def moved(self, tier: Tier, component: TreeComponent, source: bytes, target: bytes) -> None:
        """Slots of a pool moved, with the data in them (K7).

        Raises:
            ContractViolation: K7, the data may not exist yet.
        """
        fence = self.cache.journal.fence
        named = tier is Tier.DEVICE and self.cache.config.payload and fence is not None
        if named and fence is not None and fence.wait(0.0) is False:
            raise ContractViolation(
                "K7",
                component.name,
                f"{len(source) // SLOT_BYTES} DEVICE slots moved before the engine's computation "
                "reached the point that it named",
            )
        self.contents.moved(tier, component, source, target)
        if tier is Tier.DEVICE and not component.is_state:
            self.shares.moved(component, source, target)

    def operations(self) -> Iterator[Operation]:
        """Transfers in flight; O(transfers)."""
        for queue in self.queues:
            for transfer in queue:
                if transfer.operation is not None:
                    yield transfer.operation


class Holdings(NamedTuple):
    """A request's slots of each pool, by position in `Books.pools`.

    Attributes:
        promised: slots it may still take.
        private: slots it owns.
    """

    promised: list[int]
    private: list[int]


def holdings(watched: Watched, request: Request) -> Holdings:
    """Count a request's slots from its tables, not from its accounts."""
    books = watched.books
    promised = [part.account.promised for part in request.components]
    private = [
        sum([len(run.device) for run in part.runs]) // SLOT_BYTES if part.runs else 0
        for part in request.components
    ]
    for state_component in request.state_components:
        private[state_component.component.index] = len(state_component.owned())
    if len(books.pools) > books.n_device:
        rest = [0] * (len(books.pools) - books.n_device)
        promised += rest
        private += rest
        _add_others(watched, request, promised, private)
    return Holdings(promised, private)


def _add_others(
    watched: Watched, request: Request, promised: list[int], private: list[int]
) -> None:
    """The request's part of HOST pools and private ones."""
    books = watched.books
    for part in request.components:
        if part.host_account is not None:
            at = books.host[part.component.index]
            promised[at] = part.host_account.promised
            private[at] = sum([len(run.host) for run in part.runs if run.host]) // SLOT_BYTES
        if part.private:
            for at, slots in zip(books.private_of(part.component), part.private):
                private[at] = len(slots) // SLOT_BYTES
