"""The interfaces of parts that are packages of their own, see `kvgraft.optional`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from kvgraft.errors import NoStorageError

if TYPE_CHECKING:
    import torch

    from kvgraft.requests.hits import Loaded
    from kvgraft.requests.request import Request
    from kvgraft.tree.keys import TokenKey
    from kvgraft.tree.ledger import SlotOwner
    from kvgraft.tree.pinning import Receipt
    from kvgraft.types import Tier

__all__ = [
    "Arenas",
    "EventStream",
    "NoStorage",
    "Prefetch",
    "Recorder",
    "Step",
    "StorageTier",
    "TableChanges",
    "Tracers",
]


class Prefetch(Protocol):
    """A fetch from STORAGE that was started when its request was queued.

    Attributes:
        key: of the request.
        reason: why it ended.
    """

    key: TokenKey
    reason: str

    @property
    def anchor_tokens(self) -> int:
        """The boundary at which it began."""

    @property
    def tokens(self) -> int:
        """The end of the resumable part that it brought."""

    @property
    def gained_tokens(self) -> int:
        """Tokens that STORAGE made resumable."""

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""

    @property
    def ready(self) -> bool:
        """Whether the policy lets the request begin; never blocks (S6)."""


class StorageTier(Protocol):
    """The tier behind HOST, `Cache.storage`: part `storage`.

    Attributes:
        busy: whether the last `poll` left work because its time was up: poll again without a pause.
        on_prefetch: called with every prefetch that starts; None for no call.
    """

    busy: bool
    on_prefetch: Callable[[Any], object] | None

    @property
    def n_in_flight(self) -> int:
        """Prefetches and writes that have not ended."""

    def attach(self, backend: Any) -> None:
        """Use an open store from now on (S11)."""

    def detach(self, deadline_s: float | None = None) -> Any:
        """Detach the store while serving: drain, stop, release (S11); returns a ticket."""

    def clear(self) -> Any:
        """Remove everything from the store; returns a ticket."""

    def prefetch(self, key: TokenKey) -> Prefetch:
        """Begin to fetch a prefix; returns at once (S6)."""

    def cancel(self, prefetch: Any) -> None:
        """The request was given up before it began."""

    def save(self, path: str | Path) -> int:
        """Write the index of stored data to a file; returns its nodes."""

    def load(self, path: str | Path) -> Any:
        """Fill HOST with the data that a predecessor used last, while requests are served."""

    def stats(self) -> Any:
        """A copy of what it counted."""

    def ask_store(self, timeout_s: float) -> Any:
        """The store's own `n_records` and `nbytes`; None without an answer in so many seconds."""

    # the cache's calls

    def expect(self, prefetch: object) -> None:
        """Raise `LeaseError` for other objects than this tier's prefetches."""

    def before_begin(self, key: TokenKey, prefetch: Any) -> None:
        """A request is about to be matched: publish the pages that arrived for it (S5)."""

    def give_way(self) -> Any:
        """Unpin HOST data kept for a request that has not begun (A8); None if there is none."""

    def take_back(self, given: Any) -> None:
        """Pin again data that was given up in vain: a list of results of `give_way` (A9)."""

    def poll(self) -> None:
        """Continue all work under way, within a slice of time."""

    def drain(self, timeout_s: float) -> bool:
        """Wait for all work under way, at most so long; whether it ended."""

    def cleared(self, namespaces: Collection[object] | None, version: object) -> bool:
        """Namespaces, or all with None, are cleared: no data of theirs is found from now on."""

    def owners(self) -> list[SlotOwner]:
        """HOST slots that its fetches hold (T8)."""

    def receipts(self) -> list[Receipt]:
        """Pins that it holds."""

    def check(self) -> None:
        """Raise `IntegrityError` unless its own books add up."""

    def close(self, timeout_s: float) -> bool:
        """Write the data that is queued, at most so long, and stop."""


class Arenas(Protocol):
    """One budget of bytes for several pools, and where the boundary between them is (K7).

    Attributes:
        by_tier: the arena of each tier that has one.
        mover: moves slots; its `on_move` is called with each move, for checks.
        balances: decide where boundaries move.
    """

    by_tier: dict[Tier, Any]
    mover: Any
    balances: list[Any]

    @property
    def n_pending(self) -> int:
        """Pools that will get memory of others."""

    @property
    def moved_slots(self) -> int:
        """Slots that moved so far: a table read before another move is invalid."""

    def used(self, request: Request) -> None:
        """An admitted request uses the data that its lease pins."""

    def wish(self, needs: Mapping[str, int]) -> None:
        """A deferred request needs so many DEVICE slots, by component."""

    def could_hold(self, name: str, needs: Mapping[str, int]) -> bool:
        """Whether a component's pool could have them with another boundary."""

    def extent_of(self, name: str, tier: Tier) -> int:
        """Slots of one extent of a component's pool."""

    def move(self, giver: str, taker: str, tier: Tier) -> bool:
        """Move an extent from one pool to another; whether it moves."""

    def poll(self) -> None:
        """Make the moves that are due."""

    def check(self) -> None:
        """Raise `IntegrityError` unless the extents add up."""


class EventStream(Protocol):
    """Events of a cache for one reader.

    Attributes:
        lost: events that it lost since the cache was opened (V3).
        failures: how often its observer raised.
    """

    lost: int
    failures: int

    def __len__(self) -> int:
        """Events that wait."""

    def begin_again(self) -> None:
        """Drop the waiting events; the next ones are a snapshot."""

    def take(self) -> list[Any]:
        """The events since the last call, oldest first."""

    def close(self) -> None:
        """Stop collecting events for this reader."""


class Recorder(Protocol):
    """Makes events of the tree's changes for the streams that are open: part `events`."""

    def open(self, limit: int, observer: Callable[[list[Any]], object] | None) -> Any:
        """A stream, for at most `limit` events that wait."""

    def hit(self, request: Request, loaded: Loaded) -> None:
        """A request was admitted and resumes from a prefix."""

    def deliver(self) -> None:
        """Give observers their events."""

    def check(self) -> None:
        """Raise `IntegrityError` unless a mirror of the events equals the tree (V2)."""


class Tracers(Protocol):
    """The tracers of a cache: part `tracers`; false when there are none."""

    def __bool__(self) -> bool:
        """Whether there is one."""

    def add(self, tracer: Any) -> None:
        """Notify a tracer from now on."""

    def remove(self, tracer: Any) -> None:
        """Stop notifying a tracer."""

    def notify(self, step: str, *about: object) -> None:
        """Call one method of all tracers; their exceptions do not reach the cache's caller."""


class TableChanges(Protocol):
    """The entries of one page table that a step wrote; made into tensors when they are read.

    `mirror.view(-1).index_copy_(0, changes.places, changes.slots)` repeats them in a copy on
    another device. An entry may be there more than once; the last one counts, and they are all
    equal then. Some may be as they were.
    """

    @property
    def places(self) -> torch.Tensor:
        """Their places in the flat table, int64 `[n]`."""

    @property
    def slots(self) -> torch.Tensor:
        """Their new values, int32 `[n]`."""


class Step(NamedTuple):
    """The pass of the model to run next, as attention kernels take it.

    Attributes:
        requests: those that go on, in the order they were given in; the batch.
        refused: those for which there was no room, each unchanged: retract one, or step it again
            when others have ended.
        rows: int64 `[n_requests]`, their rows of the page tables.
        seq_lens: int32 `[n_requests]`, their tokens, those of the pass included.
        slot_mapping: by paged component, int64 `[n_requests * (n_tokens + n_drafts)]`: where the
            pass writes each new token, `slot * page_size + offset`; -1 for tokens that get no slot,
            and for drafts that it leaves out. Only of components with one slot per page.
        state_slots: by state component, int64 `[n_requests]`: the states that the pass writes.
        changes: by paged component, the entries of its table that changed since the step before.
        n_tokens: int64 `[n_requests]`, the tokens of each that a pass with drafts computes; else
            None.
    """

    requests: list[Request]
    refused: list[Request]
    rows: torch.Tensor
    seq_lens: torch.Tensor
    slot_mapping: dict[str, torch.Tensor]
    state_slots: dict[str, torch.Tensor]
    changes: dict[str, TableChanges]
    n_tokens: torch.Tensor | None


class NoStorage:
    """No storage tier: it is false, and each use raises an error that says how to have one.

    Raises:
        NoStorageError: any of the tier's methods is used. `hasattr` answers False.
    """

    def __bool__(self) -> Literal[False]:
        return False

    def __repr__(self) -> str:
        return "<no storage tier>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NoStorageError(
            f"storage.{name}: this cache has no storage tier; open it with storage={{'model': "
            "'my-model', 'weights': 'rev-1', 'url': 'file:/var/cache/kvgraft'}, or ask "
            "`if cache.storage:` first"
        )
