"""The rows of running requests: page tables and lengths, as attention kernels index them.

One int32 table `[max_requests, max_pages]` per paged component, and one number per row of all that
a step asks of most requests, so that it is a few array operations for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvgraft.errors import ConfigError, IntegrityError
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import Request
from kvgraft.requests.tables import DEVICE, slot_table
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.tree import Tree

__all__ = ["RowLimits", "Rows", "TableChanges", "row_limits", "spread"]

Ints: TypeAlias = npt.NDArray[np.int64]
Slots: TypeAlias = npt.NDArray[np.int32]

NO_SLOT = -1
"""The entry of a page of which a request holds nothing."""

FEWEST_ROWS = 16
FEWEST_PAGES = 64
"""The size of tables without bounds at first; they grow by doubling."""


class RowLimits(NamedTuple):
    """The bounds of the page tables; None for tables that grow.

    Attributes:
        requests: most requests that have a row at a time.
        pages: most pages of one.
    """

    requests: int | None
    pages: int | None


def row_limits(max_requests: int | None, max_tokens: int | None, page_size: int) -> RowLimits:
    """The bounds that the settings give."""
    return RowLimits(max_requests, None if max_tokens is None else -(-max_tokens // page_size))


class TableChanges(NamedTuple):
    """The entries of one page table that changed since the step before.

    `mirror.view(-1).index_copy_(0, places, slots)` repeats them in a copy on another device. An
    entry may be there more than once; the last one counts, and they are all equal then.

    Attributes:
        places: int64 `[n]`, in the flat table.
        slots: int32 `[n]`, their new values.
    """

    places: torch.Tensor
    slots: torch.Tensor


class Rows:
    """The running requests' rows.

    A row is its request's from its first step until it ends or restarts; then it is another's.
    Entries of a row behind its request's pages have no meaning.

    Args:
        tree: the components.
        limits: bounds of the tables.
        pinned: whether the tables lie in page-locked memory, for copies to CUDA.

    Attributes:
        tables: int32 `[n_rows, n_slots]` per component, by its index; None of state components.
        states: int32 `[n_rows]` of live state slots per component, by its index.
        tracked: the same of the states kept at the last page boundary; -1 for none.
        request: by row; None where it is nobody's.
        stale: rows whose request was changed by other calls than `step`.
        length: tokens computed.
        allocated: pages with slots.
        given: position behind the tokens that the last step gave slots to.
        quiet: up to this many tokens nothing is to be done for a request but to count them.
        promised: up to this many pages its slots are promised.
        scarce: from this many pages on, and
        behind: from this many tokens on: pages behind its reaches make room for the next ones.
        tracks: whether its states are kept at every page boundary.
        slides: whether its pins are loosened as it goes on.
        held_from: the first page that a request holds, per component, by its index.
    """

    def __init__(self, tree: Tree, limits: RowLimits, *, pinned: bool) -> None:
        self.tree = tree
        self.limits = limits
        self.pinned = pinned
        self.paged = [each for each in tree.components if not each.is_state]
        self.state_components = [each for each in tree.components if each.is_state]
        self.n_rows = self.n_pages = 0
        self.tables: list[Slots | None] = [None] * len(tree.components)
        no_states = np.zeros(0, np.int32)
        self.states: list[Slots] = [no_states] * len(tree.components)
        self.tracked: list[Slots] = [no_states] * len(tree.components)
        self.request: list[Request | None] = []
        self.free: list[int] = []
        self.stale: set[int] = set()
        self.length = self.allocated = self.given = np.zeros(0, np.int64)
        self.quiet = self.promised = self.scarce = self.behind = self.length
        self.tracks = self.slides = np.zeros(0, np.bool_)
        self.held_from = [self.length] * len(tree.components)
        self._entered: list[list[tuple[int, bytes]]] = [[] for _ in tree.components]
        self._changed: list[list[tuple[Ints, Slots]]] = [[] for _ in tree.components]
        self._no_changes = TableChanges(
            torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
        )

    def __len__(self) -> int:
        return self.n_rows - len(self.free)

    # -- size

    def room_for(self, n_requests: int, n_pages: int) -> None:
        """Make the tables large enough for as many more requests, and for pages of one.

        Raises:
            ConfigError: they are larger than the limits; nothing has changed.
        """
        rows = len(self) + n_requests
        most_rows, most_pages = self.limits
        if most_rows is not None and rows > most_rows:
            raise ConfigError(
                f"step: {rows} requests have a row, max_requests={most_rows}; end some, or open "
                "the cache with more"
            )
        if most_pages is not None and n_pages > most_pages:
            size = self.tree.page_size
            raise ConfigError(
                f"step: a request of {n_pages * size} tokens, by whole pages, max_tokens="
                f"{most_pages * size}; end it, or open the cache with more"
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
        self.length = _longer(self.length, more)
        self.allocated = _longer(self.allocated, more)
        self.given = _longer(self.given, more)
        self.quiet = _longer(self.quiet, more)
        self.promised = _longer(self.promised, more)
        self.scarce = _longer(self.scarce, more)
        self.behind = _longer(self.behind, more)
        self.tracks = np.concatenate([self.tracks, np.zeros(more, np.bool_)])
        self.slides = np.concatenate([self.slides, np.zeros(more, np.bool_)])
        self.held_from = [_longer(each, more) for each in self.held_from]
        self.request += [None] * more
        self.free = [*range(n_rows - 1, self.n_rows - 1, -1), *self.free]
        self.n_rows, self.n_pages = n_rows, n_pages
        for changes in self._changed:
            changes.clear()  # places in the flat table are others now

    # -- rows of requests

    def take(self, request: Request) -> None:
        """Give a request a row; there is room for it."""
        row = self.free.pop()
        self.request[row] = request
        request.row = row
        self.given[row] = request.computed
        self.touch(row)

    def give_back(self, request: Request) -> None:
        """A request has ended, or is matched again: its row is nobody's."""
        row = request.row
        if row >= 0:
            self.request[row] = None
            self.free.append(row)
            self.stale.discard(row)
            request.row = -1

    def touch(self, row: int) -> None:
        """A request was changed by another call than `step`: its row is read anew."""
        self.quiet[row] = 0
        self.stale.add(row)

    def touch_all(self) -> None:
        """Slots have moved: all rows are read anew."""
        for row, request in enumerate(self.request):
            if request is not None:
                self.touch(row)

    def resync(self) -> None:
        """Read the lengths of stale rows anew."""
        for row in self.stale:
            request = self.request[row]
            assert request is not None
            self.length[row], self.allocated[row] = request.computed, request.allocated
            self.given[row] = max(self.given[row], request.computed)

    # -- tables

    def read(self, component: TreeComponent, request: Request, first: int) -> None:
        """Bring a request's row of one table up to date; only entries that differ are written.

        The pages before `first` are left out: there the request holds none, and the row says so.
        """
        table = self.tables[component.index]
        assert table is not None
        slots = slot_table(request, component, DEVICE, first)
        start = first * component.slots_per_page
        different = np.flatnonzero(table[request.row, start : start + len(slots)] != slots)
        if len(different):
            place = request.row * table.shape[1] + start
            self.write(component, place + different, slots[different])
        if not component.is_prefix_closed:
            held = int((slots >= 0).argmax()) // component.slots_per_page if len(slots) else 0
            self.held_from[component.index][request.row] = first + held

    def follow(self, component: TreeComponent, request: Request, allocated: int) -> None:
        """A request left pages of a bounded reach behind, or took some: bring its row up to date.

        `allocated` is how many it had before.
        """
        index, row = component.index, request.row
        held_from = self.held_from[index]
        own = request.parts[index].stretch
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
            slots = request.parts[component.index].newest(n_slots)
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
                self.write(component, spread(first, n), slots)
                entered.clear()

    def write(self, component: TreeComponent, index: Ints, slots: Slots) -> None:
        """Write entries of a table by their places in the flat one."""
        table = self.tables[component.index]
        assert table is not None
        table.reshape(-1)[index] = slots
        self._changed[component.index].append((index, slots))

    def take_changes(self) -> dict[str, TableChanges]:
        """The entries that changed since this was asked last, by component."""
        found: dict[str, TableChanges] = {}
        for component in self.paged:
            changes = self._changed[component.index]
            if not changes:
                found[component.name] = self._no_changes
                continue
            if len(changes) == 1:
                index, slots = changes[0]
                # slots may be a view of bytes, which torch takes for writable
                slots = slots.copy()
            else:
                index = np.concatenate([each for each, _ in changes])
                slots = np.concatenate([each for _, each in changes])
            changes.clear()
            found[component.name] = TableChanges(torch.from_numpy(index), torch.from_numpy(slots))
        return found

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
        for part in request.state_parts:
            index = part.component.index
            self.states[index][request.row] = state_number(part.live)
            self.tracked[index][request.row] = state_number(part.tracked)

    def check(self, requests: Sequence[Request]) -> None:
        """Compare the rows with their requests, but for stale ones; O(entries).

        Raises:
            IntegrityError: T9, a row or an entry of a table is another's.
        """
        wrong = self._wrong(requests)
        if wrong:
            raise IntegrityError("T9", None, wrong[0])

    def _wrong(self, requests: Sequence[Request]) -> list[str]:
        """Rows that contradict their requests, in words; of those that are not stale."""
        wrong: list[str] = []
        owners = [each for each in self.request if each is not None]
        if len(owners) + len(self.free) != self.n_rows or len(set(self.free)) < len(self.free):
            wrong.append(f"{len(owners)} rows taken, {len(self.free)} free, of {self.n_rows}")
        running = {id(each) for each in requests}
        for row, request in enumerate(self.request):
            if request is None:
                continue
            if request.row != row or id(request) not in running:
                wrong.append(f"row {row} is of {request!r}, whose row is {request.row}")
            elif row not in self.stale:
                wrong += self._wrong_in(row, request)
        return wrong

    def check_row(self, request: Request) -> None:
        """Compare one request's row with it.

        Raises:
            IntegrityError: T9, as in `check`.
        """
        wrong = self._wrong_in(request.row, request)
        if wrong:
            raise IntegrityError("T9", None, wrong[0])

    def _wrong_in(self, row: int, request: Request) -> list[str]:
        said = (int(self.length[row]), int(self.allocated[row]))
        is_so = (request.computed, request.allocated)
        wrong = [] if said == is_so else [f"row {row} is at {said}, {request!r} at {is_so}"]
        for component in self.paged:
            table = self.tables[component.index]
            assert table is not None
            slots = slot_table(request, component, DEVICE)
            if not np.array_equal(table[row, : len(slots)], slots):
                at = int(np.flatnonzero(table[row, : len(slots)] != slots)[0])
                wrong.append(
                    f"{component.name!r}: the table has slot {table[row, at]} at {at} of row {row}"
                    f", {request!r} has {slots[at]}"
                )
        for component in self.state_components:
            part = request.state_part(component.index)
            assert part is not None
            states = self.states[component.index][row], self.tracked[component.index][row]
            held = state_number(part.live), state_number(part.tracked)
            if states != held:
                wrong.append(f"{component.name!r}: row {row} has states {states}, not {held}")
        return wrong


def spread(first: Ints, n: Ints) -> Ints:
    """`n` places in a row from each of `first` on, one after the other."""
    total = int(n.sum())
    if total == len(n):
        return first
    before = np.cumsum(n) - n
    return np.repeat(first - before, n) + np.arange(total, dtype=np.int64)


def state_number(slot: bytes | None) -> int:
    """The number of a state's slot; -1 for none."""
    return NO_SLOT if slot is None else int.from_bytes(slot, sys.byteorder)


def _doubled(n: int, was: int) -> int:
    """At least `n`, and more than twice as many as before where that is too few."""
    return max(n, 2 * was) if n > was else was


def _longer(numbers: Ints, more: int) -> Ints:
    return np.concatenate([numbers, np.zeros(more, np.int64)])
