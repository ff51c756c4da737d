"""The rows of running requests: page tables and lengths, as attention kernels index them.

One int32 table `[max_requests, max_pages]` per paged component, and arrays with a number per row,
so that a step of most requests is a few array operations. One of the numbers is how far a decoding
request may go on the fast path.
"""

from __future__ import annotations

from operator import is_
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.errors import ConfigError
from kvgraft.parts import TableChanges
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.publishing import BEHIND_TOKENS
from kvgraft.requests.request import Request
from kvgraft.requests.tables import NO_SLOT, slot_table, state_number
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import DEVICE
from kvgraft.tree.pinning import NO_PAGE, Receipt
from kvgraft.tree.tree import Tree

__all__ = [
    "NO_EVICT_FIRST",
    "Changes",
    "EvictFirstSchedule",
    "Rows",
    "evict_first_schedule",
    "slides_from",
    "spread",
]

Ints: TypeAlias = npt.NDArray[np.int64]
Slots: TypeAlias = npt.NDArray[np.int32]

NO_PLACES: Ints = np.zeros(0, np.int64)
NO_SLOTS: Slots = np.zeros(0, np.int32)

NUMBERS = (
    "length",
    "allocated",
    "given",
    "draft_edits",
    "next_event_tokens",
    "promised",
)
"""Arrays of `Rows` with a number for each row."""

FEWEST_ROWS = 16
FEWEST_PAGES = 64
"""The size of tables without bounds at first; they grow by doubling."""


class Changes:
    """The entries of one page table that a step wrote; made into tensors when they are read."""

    def __init__(self, written: list[tuple[Ints, Ints, Slots]]) -> None:
        self._written = written

    @property
    def places(self) -> torch.Tensor:
        """Their places in the flat table, int64 `[n]`."""
        found = [spread(first, n) for first, n, _ in self._written]
        return torch.from_numpy(np.concatenate([NO_PLACES, *found]))

    @property
    def slots(self) -> torch.Tensor:
        """Their new values, int32 `[n]`."""
        return torch.from_numpy(np.concatenate([NO_SLOTS, *[each[2] for each in self._written]]))


class Rows:
    """The running requests' rows.

    A row belongs to its request from its first step until it ends or restarts. Entries of a row
    behind its request's pages have no meaning.

    Args:
        tree: the components.
        max_requests: most that have a row at a time; None for tables that grow.
        max_tokens: most of one, by whole pages; None for tables that grow.
        pinned: whether the tables lie in page-locked memory, for copies to CUDA.

    Attributes:
        tables: int32 `[n_rows, n_slots]` per component, by its index; None of state components.
        states: int32 `[n_rows]` of live state slots per component, by its index.
        tracked: the same of the states kept at the last page boundary; -1 for none.
        request: by row; None for an unused one.
        stale: rows whose request was changed by other calls than `step`.
        cuts: where keys were cut since the last step, by row: of tokens behind none counts.
        length: tokens computed.
        allocated: pages with slots.
        given: position behind the tokens that the last step gave slots to.
        draft_edits: the key's edits when it held the last step's drafts; below 0 if it did not.
        next_event_tokens: up to this many, a request's tokens are only counted.
        promised: up to this many pages its slots are promised.
        tracks: whether its states are kept at every page boundary.
        slides: whether its pins are released as it goes on.
        held_from: the first page that a request holds, per component, by its index.
    """

    def __init__(
        self, tree: Tree, max_requests: int | None, max_tokens: int | None, *, pinned: bool
    ) -> None:
        self.tree = tree
        self.most_rows = max_requests
        self.most_pages = None if max_tokens is None else -(-max_tokens // tree.page_size)
        self.pinned = pinned
        self.paged = [each for each in tree.components if not each.is_state]
        self.state_components = [each for each in tree.components if each.is_state]
        self.n_rows = self.n_pages = 0
        self.tables: list[Slots | None] = [None] * len(tree.components)
        self.states: list[Slots] = [NO_SLOTS] * len(tree.components)
        self.tracked: list[Slots] = [NO_SLOTS] * len(tree.components)
        self.request: list[Request | None] = []
        self.free: list[int] = []
        self.stale: set[int] = set()
        self.cuts: dict[int, int] = {}
        self.length = self.allocated = self.given = self.draft_edits = NO_PLACES
        self.next_event_tokens = self.promised = self.length
        self.tracks = self.slides = np.zeros(0, np.bool_)
        self.held_from = [self.length] * len(tree.components)
        self._known: tuple[tuple[Request, ...], Ints] | None = None
        self._entered: list[list[tuple[int, bytes]]] = [[] for _ in tree.components]
        self._changed: list[list[tuple[Ints, Ints, Slots]]] = [[] for _ in tree.components]

    def __len__(self) -> int:
        return self.n_rows - len(self.free)

    # -- size

    def room_for(self, n_requests: int, n_pages: int) -> None:
        """Make the tables large enough for this many more requests, and for the pages of one.

        The pages are within the limit, if there is one.

        Raises:
            ConfigError: more requests than the limit; nothing has changed.
        """
        rows = len(self) + n_requests
        most_rows, most_pages = self.most_rows, self.most_pages
        if most_rows is not None and rows > most_rows:
            raise ConfigError(
                f"step: {rows} requests have a row, max_requests={most_rows}; end some, or open "
                "the cache with more"
            )
        if rows > self.n_rows or n_pages > self.n_pages or not self.n_rows:
            wide = most_pages or max(FEWEST_PAGES, self.n_pages, _doubled(n_pages, self.n_pages))
            high = most_rows or max(FEWEST_ROWS, self.n_rows, _doubled(rows, self.n_rows))
            self._grow(high, wide)

    def _grow(self, n_rows: int, n_pages: int) -> None:
        for component in self.paged:
            table = torch.zeros(
                (n_rows, n_pages * component.slots_per_page),
                dtype=torch.int32,
                pin_memory=self.pinned,
            ).numpy()
            old = self.tables[component.index]
            if old is not None:
                table[: old.shape[0], : old.shape[1]] = old
            self.tables[component.index] = table
        more = n_rows - self.n_rows
        none = np.full(more, NO_SLOT, np.int32)
        self.states = [np.concatenate([each, none]) for each in self.states]
        self.tracked = [np.concatenate([each, none]) for each in self.tracked]
        for name in (*NUMBERS, "tracks", "slides"):
            setattr(self, name, _longer(getattr(self, name), more))
        self.held_from = [_longer(each, more) for each in self.held_from]
        self.request += [None] * more
        self.free = [*range(n_rows - 1, self.n_rows - 1, -1), *self.free]
        self.n_rows, self.n_pages = n_rows, n_pages
        self._changed = [[] for _ in self._changed]  # places in the flat table are others now

    # -- rows of requests

    def take(self, request: Request) -> None:
        """Give a request a row; there is room for it."""
        row = self.free.pop()
        self._known = None
        self.request[row] = request
        request.row = row
        self.given[row], self.draft_edits[row] = request.computed, -1
        request.cuts = self.cuts
        self.touch(row)

    def give_back(self, request: Request) -> None:
        """A request has ended, or is matched again: free its row."""
        row = request.row
        if row >= 0:
            self._known = None
            self.request[row] = None
            self.free.append(row)
            self.stale.discard(row)
            request.row = -1

    def know(self, requests: list[Request], rows: Ints) -> None:
        """Note the requests of a step with their rows: the next step probably has the same."""
        self._known = tuple(requests), rows

    def known(self, requests: list[Any]) -> Ints | None:
        """The rows of the last step's requests, if these are the same; else None."""
        if self._known is None or len(requests) != len(self._known[0]):
            return None
        return self._known[1] if all(map(is_, requests, self._known[0])) else None

    def touch(self, row: int) -> None:
        """Another call than `step` changed a request: its row will be read again."""
        self.next_event_tokens[row] = 0
        self.stale.add(row)

    def touch_all(self) -> None:
        """Slots have moved: all rows will be read again."""
        for row, request in enumerate(self.request):
            if request is not None:
                self.touch(row)

    def resync(self) -> None:
        """Read the lengths of stale rows anew, and where keys were cut."""
        for row in self.stale:
            request = self.request[row]
            assert request is not None
            self.length[row], self.allocated[row] = request.computed, request.allocated
            self.given[row] = max(self.given[row], request.computed)
        if self.cuts:
            rows, ends = list(self.cuts), list(self.cuts.values())
            self.given[rows] = np.maximum(np.minimum(self.given[rows], ends), self.length[rows])
            self.cuts.clear()

    # -- tables

    def read(self, component: TreeComponent, request: Request, first: int) -> None:
        """Bring a request's row of one table up to date: from the first to the last that differs.

        The pages before `first` are left out: there the request holds none, and the row says so.
        """
        table = self.tables[component.index]
        assert table is not None
        slots = slot_table(request, component, DEVICE, first)
        start = first * component.slots_per_page
        row = table[request.row, start : start + len(slots)]
        different = (row != slots).tobytes()  # searched faster than an array
        low = different.find(1)
        if low >= 0:
            new = slots[low : different.rfind(1) + 1]
            row[low : low + len(new)] = new
            place = np.array([request.row * table.shape[1] + start + low])
            self._changed[component.index].append((place, np.array([len(new)]), new))
        if not component.is_prefix_closed:
            held = int((slots >= 0).argmax()) // component.slots_per_page if len(slots) else 0
            self.held_from[component.index][request.row] = first + held

    def follow(self, component: TreeComponent, request: Request, allocated: int) -> None:
        """A request left pages of a bounded reach behind, or took some: bring its row up to date.

        `allocated` is how many it had before.
        """
        index, row = component.index, request.row
        held_from = self.held_from[index]
        own = request.components[index].stretch
        first = int(held_from[row])
        if own is None or request.receipt.segments[index] or own.end != request.allocated:
            self.read(component, request, first)
            return
        start = own.start
        if start > first:
            n_slots = (start - first) * component.slots_per_page
            self._enter(component, request, first, b"\xff" * (n_slots * SLOT_BYTES))
            held_from[row] = start
        self.append(component, request, max(allocated, start))

    def append(self, component: TreeComponent, request: Request, first: int) -> None:
        """Enter the pages from `first` on, which the request took last."""
        n_slots = (request.allocated - first) * component.slots_per_page
        if n_slots > 0:
            slots = request.components[component.index].newest(n_slots)
            self._enter(component, request, first, slots)

    def _enter(self, component: TreeComponent, request: Request, first: int, slots: bytes) -> None:
        """Slots of pages from `first` on, int32 as bytes; they are written with others."""
        per_page = component.slots_per_page
        place = (request.row * self.n_pages + first) * per_page
        self._entered[component.index].append((place, slots))

    def write_entered(self) -> None:
        """Write what `follow` and `append` entered; until then the tables lack it."""
        for component in self.paged:
            entered = self._entered[component.index]
            if entered:
                slots = np.frombuffer(b"".join([each for _, each in entered]), np.int32)
                n = np.array([len(each) for _, each in entered], np.int64) // SLOT_BYTES
                first = np.array([place for place, _ in entered], np.int64)
                self.write(component, first, n, slots)
                entered.clear()

    def write(self, component: TreeComponent, first: Ints, n: Ints, slots: Slots) -> None:
        """Write `n` entries of a table from each of `first` on, by their places in the flat one."""
        table = self.tables[component.index]
        assert table is not None
        table.reshape(-1)[spread(first, n)] = slots
        self._changed[component.index].append((first, n, slots))

    def take_changes(self) -> dict[str, TableChanges]:
        """The entries that changed since the last call, by component."""
        changed, self._changed = self._changed, [[] for _ in self._changed]
        return {each.name: Changes(changed[each.index]) for each in self.paged}

    def tensor(self, component: TreeComponent) -> torch.Tensor:
        """The table of a paged component.

        Raises:
            ConfigError: it has none.
        """
        if component.is_state:
            raise ConfigError(
                f"component {component.name!r} keeps states and has no page table; see "
                "Step.state_slots"
            )
        self.room_for(0, 0)
        table = self.tables[component.index]
        assert table is not None
        return torch.from_numpy(table)

    def read_states(self, request: Request) -> None:
        """Bring the numbers of a request's states up to date."""
        for part in request.state_components:
            index = part.component.index
            self.states[index][request.row] = state_number(part.live)
            self.tracked[index][request.row] = state_number(part.tracked)


def spread(first: Ints, n: Ints) -> Ints:
    """`n` places in a row from each of `first` on, one after the other."""
    total = int(n.sum())
    if total == len(n):
        return first
    before = np.cumsum(n) - n
    return np.repeat(first - before, n) + np.arange(total, dtype=np.int64)


def _doubled(n: int, was: int) -> int:
    """At least `n`, and more than twice as many as before where that is too few."""
    return max(n, 2 * was) if n > was else was


def _longer(numbers: npt.NDArray[Any], more: int) -> npt.NDArray[Any]:
    return np.concatenate([numbers, np.zeros(more, numbers.dtype)])


class EvictFirstSchedule(NamedTuple):
    """When a decoding request has evict-first pages, those behind its reaches.

    Attributes:
        page: at this boundary at the latest.
        low: from this boundary on, because no more pages are promised.
    """

    page: int
    low: int


NO_EVICT_FIRST = EvictFirstSchedule(NO_PAGE, NO_PAGE)
"""Where every page is needed."""


def evict_first_schedule(request: Request, following: int, size: int) -> EvictFirstSchedule:
    """When `Publisher.leave_behind` next has work for a decoding request, as far as known.

    `following` is the next boundary, `size` the tokens of a page.
    """
    collects = -(-BEHIND_TOKENS // size) if size < BEHIND_TOKENS else 1
    page = behind = pages = NO_PAGE
    for part in request.bounded_components:
        component = part.component
        pages = min(pages, part.account.promised // component.slots_per_page)
        window = component.window_pages
        first = part.first_page if part.holds_pages else request.allocated
        if window is None:
            page = behind = following
        else:
            page = min(page, first + window + collects)
            behind = min(behind, first + window + 1)
    low = request.allocated + max(0, pages) - request.draft_pages
    return EvictFirstSchedule(page, max(behind, low))


def slides_from(tree: Tree, receipt: Receipt, following: int) -> int:
    """The first page position at which `pinning.slide` unpins something; `following` where any may.

    Valid until a node is split (`Tree.n_splits`). NO_PAGE if there is nothing to unpin.
    """
    page = NO_PAGE
    for component in tree.components:
        segment = receipt.segments[component.index]
        if not segment or component.is_prefix_closed:
            continue
        window = component.window_pages
        if component.is_state or window is None or len(segment) > 1:
            return following
        start, end = segment[0]
        node = receipt.anchor
        while node.start > start:
            node = node.parent  # type: ignore[assignment]
        page = min(page, min(node.end, end) + window)
    return page
