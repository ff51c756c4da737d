"""A request's part of one component: its promises, and the slots that it holds."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.inserting import Run
from kvgraft.tree.ledger import HOST, Ledger, SlotOwner
from kvgraft.tree.node import Node
from kvgraft.types import Demand, Span, Tier


def divided(runs: list[Run], spans: Sequence[Span]) -> tuple[list[Run], list[Run]]:
    """Pages inside and outside `spans`, which are in order and may overlap at their ends."""
    inside: list[Run] = []
    outside: list[Run] = []
    for run in runs:
        position = run.first
        for span in spans:
            start, end = max(position, span.start), min(run.end, span.end)
            if start >= end:
                continue
            if start > position:
                outside.append(run.cut(position, start))
            if (start, end) == (run.first, run.end):
                inside.append(run)
            else:
                part = run.cut(start, end)
                if inside and inside[-1].end == start:
                    inside[-1] = inside[-1].joined(part)
                else:
                    inside.append(part)
            position = end
        if position == run.first:
            outside.append(run)
        elif position < run.end:
            outside.append(run.cut(position, run.end))
    return inside, outside


class Account:
    """A promise on a ledger.

    A request never holds more than `peak` private slots of the pool at a time. Its held and
    promised slots add up to at most that; slots it gives back renew the promise as long as it has
    pages to compute. Kept in the pool's slots.

    Attributes:
        ledger: the pool's books.
        peak: most private slots held at any time.
        remaining: slots it will still take until its reservation ends.
        held: private slots it holds.
        promised: slots it may take without a check.
        load: how many of them are for its load-back.
    """

    #   held + promised <= peak + load        ledger.promised = sum of its accounts' promised
    #   take      promised - n, held + n
    #   release   held - n, promised + min(n, as much as peak and remaining allow)
    __slots__ = ("held", "ledger", "load", "peak", "promised", "remaining")

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.load = self.peak = self.remaining = self.held = self.promised = 0

    def open(self, peak: int, remaining: int, load: int) -> None:
        """Promise the request its peak and the slots of its load-back (admission)."""
        self.peak = peak
        self.remaining = remaining
        self.load = load
        self.promised = peak + load
        self.ledger.promised += peak + load

    def extend(self, n: int) -> None:
        """Promise `n` slots at once beyond the promised ones; the caller checked the headroom.

        The remaining slots do not grow by it: a chunk larger than the admitted one takes slots of
        the reservation early, and a slot behind the reservation is taken now (A11).
        """
        self.promised += n
        self.peak += n
        self.ledger.promised += n

    def add(self, n: int) -> None:
        """Promise `n` slots beyond the demand; the caller checked the headroom."""
        self.extend(n)
        self.remaining += n

    def take(self, n: int) -> bytes:
        """`n` slots become the request's; room has been made.

        Promises the missing ones first; the caller checked the headroom.
        """
        if n > self.promised:
            self.extend(n - self.promised)
        ledger = self.ledger
        slots = ledger.take_private(n)
        assert slots is not None
        self.held += n
        self.remaining = self.remaining - n if n < self.remaining else 0
        self.promised -= n
        ledger.promised -= n
        return slots

    def took(self, n: int) -> None:
        """Note `n` promised slots as taken; the ledger's books are the caller's."""
        self.held += n
        self.remaining = self.remaining - n if n < self.remaining else 0
        self.promised -= n

    def loaded(self) -> None:
        """The load-back took its slots; those that another's took are not promised again (A11)."""
        self.promised -= self.load
        self.ledger.promised -= self.load
        self.load = 0

    def renewal(self, n: int) -> int:
        """How much the promise grows when `n` held slots go to the tree or back to the pool."""
        target = self.peak - self.held + n
        target = min(target, self.remaining)
        return target - self.promised if target > self.promised else 0

    def release(self, n: int) -> None:
        """`n` held slots left the request: to the tree, or free again."""
        rise = self.renewal(n)
        self.held -= n
        if rise:
            self.promised += rise
            self.ledger.promised += rise

    def forgo(self, n: int) -> None:
        """Give up `n` promised slots for good; the request will not ask for them again."""
        n = min(n, self.promised)
        self.peak -= n
        self.remaining = max(0, self.remaining - n)
        self.promised -= n
        self.ledger.promised -= n

    def close(self) -> None:
        """Give the promise back; the owner of the slots gives those back."""
        self.ledger.promised -= self.promised
        self.promised = self.load = self.peak = self.remaining = 0


NO_DEMAND = Demand(0, 0)
"""The demand of a request without a decision yet."""


class Due(enum.Enum):
    """Why the live states at a boundary are kept before the model goes on."""

    POINT = "point"
    """A resume point that was promised its slots."""
    GRID = "grid"
    """A resume point of the grid: kept where every state component has a slot to spare."""
    LEFT = "left"
    """Left behind at the end of a chunk, where evict-first data has room."""
    DECODED = "decoded"
    """The last boundary passed while decoding that is worth a copy."""


POINT: Final = Due.POINT
DECODED: Final = Due.DECODED


class RequestComponent:
    """A request's part of one component; made by its lease, promised slots by its admission.

    Attributes:
        component: whose.
        account: promises on its DEVICE pool.
        host_account: promises on its HOST pool, for a component at home there; else None.
        host_slots: DEVICE slots its load-back takes (M4).
        demand: the demand of the last decision.
        private: slots of the component's private pools, in their order (H8).
    """

    __slots__ = (
        "_newest",
        "_newest_end",
        "_newest_first",
        "_runs",
        "account",
        "component",
        "demand",
        "host_account",
        "host_slots",
        "private",
    )

    def __init__(self, component: TreeComponent, tenant: int) -> None:
        self.component = component
        self.account = Account(component.devices[tenant])
        self.host_account: Account | None = None
        if component.home_is_host:
            self.host_account = Account(component.ledger(HOST, tenant))
        self.host_slots = 0
        self.demand = NO_DEMAND
        self.private: tuple[bytes, ...] = ()
        self._runs: list[Run] = []
        # The latest pages. They are added to the runs when those are read: a decode takes them
        # one by one, and a run is immutable, so each page would copy it.
        self._newest = bytearray()
        self._newest_first = self._newest_end = 0

    @property
    def runs(self) -> list[Run]:
        """Pages of its own, in order; none of a state component."""
        if self._newest:
            slots = bytes(self._newest)
            self._newest = bytearray()
            self._add_run(Run(self._newest_first, self._newest_end, slots))
        return self._runs

    @runs.setter
    def runs(self, runs: list[Run]) -> None:
        self._runs = runs

    @property
    def holds_pages(self) -> bool:
        """Whether it has pages of its own."""
        return bool(self._runs or self._newest)

    @property
    def first_page(self) -> int:
        """The first of its own pages."""
        return self._runs[0].first if self._runs else self._newest_first

    def give_back(self) -> None:
        """Free every slot it holds (H8)."""
        if self.holds_pages:
            self.free_pages(self.runs)
            self._runs = []

    def close_accounts(self) -> None:
        """Give its promises back; it takes no slot any more."""
        self.account.close()
        if self.host_account is not None:
            self.host_account.close()

    def owners(self, who: str, tenant: int) -> list[SlotOwner]:
        """Every slot it holds, for integrity checks."""
        name, runs = self.component.name, self.runs
        found = [SlotOwner(name, Tier.DEVICE, who, run.device, tenant) for run in runs]
        hosts = [SlotOwner(name, Tier.HOST, who, run.host, tenant) for run in runs if run.host]
        return found + hosts

    def unreserved(self, n: int) -> list[tuple[Ledger, int]]:
        """By pool, how many of `n` slots are not promised."""
        accounts = (self.account, self.host_account)
        return [
            (account.ledger, n - account.promised)
            for account in accounts
            if account is not None and n > account.promised
        ]

    def can_pin(self, others: Sequence[tuple[Node, int]], boundary: int, moved: int = 0) -> bool:
        """Whether the reach at `boundary` can be pinned on others' nodes, so many pages of each.

        The headroom must also do for the promises that rise as `moved` slots leave the request.
        """
        component = self.component
        for account in (self.account, self.host_account):
            if account is None:
                continue
            needed = account.renewal(moved) if moved else 0
            for node, n_pages in others:
                cell = node.cells[component.index]
                on_device = account is self.account
                if (cell.device if on_device else cell.host) is None or (
                    cell.device_pins if on_device else cell.host_pins
                ):
                    continue
                for start, end in component.segment_at(boundary):
                    pages = min(end, node.start + n_pages) - max(start, node.start)
                    needed += max(0, pages) * component.slots_per_page
            if needed and needed > account.ledger.headroom:
                return False
        return True

    def can_replenish(self, page: int, others: Sequence[tuple[Node, int]]) -> bool:
        """Whether pages up to `page` can move to the tree and be replaced out of headroom."""
        moved = 0
        for run in self._runs:
            if run.first < page:
                moved += min(run.end, page) - run.first
        if self._newest and self._newest_first < page:
            moved += min(self._newest_end, page) - self._newest_first
        moved *= self.component.slots_per_page
        if others:
            return self.can_pin(others, page, moved)
        for account in (self.account, self.host_account):
            if account is not None:
                rise = account.renewal(moved)
                if rise and rise > account.ledger.headroom:
                    return False
        return True

    def take_pages(self, first: int, n: int) -> None:
        """`n` slots for pages from `first` on become the request's; room has been made."""
        slots = self.account.take(n)
        end = first + n // self.component.slots_per_page
        if self.host_account is None:
            self.add_pages(first, end, slots)
        else:
            self._add_run(Run(first, end, slots, self.host_account.take(n)))

    def add_pages(self, first: int, end: int, slots: bytes) -> None:
        """Slots that were taken for pages `[first, end)` are the request's; not at home on HOST."""
        if first != self._newest_end or not self._newest:
            self._runs = self.runs
            self._newest_first = first
        self._newest += slots
        self._newest_end = end

    @property
    def stretch(self) -> Span | None:
        """Its own pages, if they are consecutive; else None."""
        runs = self._runs
        if not self._newest:
            return Span(runs[0].first, runs[0].end) if len(runs) == 1 else None
        if not runs:
            return Span(self._newest_first, self._newest_end)
        if len(runs) > 1 or runs[0].end != self._newest_first:
            return None
        return Span(runs[0].first, self._newest_end)

    def newest(self, n_slots: int) -> bytes:
        """The slots that it took last."""
        slots = self._newest or self._runs[-1].device
        return bytes(slots[-n_slots * SLOT_BYTES :])

    def _add_run(self, run: Run) -> None:
        runs = self._runs
        if runs and runs[-1].end == run.first:
            runs[-1] = runs[-1].joined(run)
        else:
            runs.append(run)

    def take_out(self, kept: Sequence[Span]) -> list[Run]:
        """Its pages outside of `kept`, in order, are the caller's from now on.

        The promises are renewed as far as they may be.
        """
        runs = self.runs
        if len(runs) == 1 and runs[0].end <= kept[0].start:
            taken, self._runs = runs, []
        else:
            self._runs, taken = divided(runs, kept)
        n = 0
        for run in taken:
            n += len(run.device)
        if n:
            self.account.release(n // SLOT_BYTES)
            if self.host_account is not None:
                self.host_account.release(n // SLOT_BYTES)
        return taken

    def free_pages(self, runs: list[Run]) -> None:
        """Give pages that were taken out back to their pools."""
        self.account.ledger.give_private(b"".join([run.device for run in runs]))
        if self.host_account is not None:
            mirror = b"".join([run.host for run in runs if run.host is not None])
            self.host_account.ledger.give_private(mirror)


class RequestState(RequestComponent):
    """A request's part of a state component. Boundaries in pages.

    Attributes:
        live: the state the model writes to.
        captured: states at boundaries not yet in the tree.
        shared: the deepest boundary whose state the tree was given since admission; 0 for none.
        tracked: the last state kept while decoding, overwritten by the next; a finished request
            leaves it behind.
        tracked_page: that boundary.
        due: boundary at which `live` stands and is to be kept before the model goes on; 0 if none.
        due_as: why it is.
    """

    __slots__ = ("captured", "due", "due_as", "live", "shared", "tracked", "tracked_page")

    def __init__(self, component: TreeComponent, tenant: int) -> None:
        RequestComponent.__init__(self, component, tenant)
        self.live: bytes | None = None
        self.tracked: bytes | None = None
        self.captured: dict[int, bytes] = {}
        self.shared = self.tracked_page = self.due = 0
        self.due_as = DECODED

    def give_back(self) -> None:
        """Free every state it holds (H8)."""
        if self.live is None and self.tracked is None and not self.captured:
            return
        for slots in self.owned():
            self.account.ledger.give_private(slots)
        self.live = self.tracked = None
        self.captured = {}

    def owners(self, who: str, tenant: int) -> list[SlotOwner]:
        """Every slot it holds, for integrity checks."""
        name = self.component.name
        return [SlotOwner(name, Tier.DEVICE, who, slots, tenant) for slots in self.owned()]

    def owned(self) -> list[bytes]:
        """The slots of all states held."""
        slots = (self.live, self.tracked, *self.captured.values())
        return [slot for slot in slots if slot is not None]
