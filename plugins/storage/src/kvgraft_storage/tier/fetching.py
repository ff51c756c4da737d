"""A running prefetch: looked up, fetched into HOST, inserted into the tree (S1 to S5).

    LOOKING ─► FETCHING ─► HANGING ─► ENDED     after a miss: fetch again, up to a
                 ▲   │                          shorter boundary
                 └───┘

Memory is reserved once the store has listed its pages: for the deepest boundary that fits and that
every component can resume from. Fetched pages are published up to such a boundary, or not at all.

The work is done in steps, between which requests run, nodes are split and evicted, and the fetch
itself may be stopped. No step takes longer for a longer sequence: pages are named, looked up,
counted, fetched and inserted into the tree a block at a time. A plan names a target boundary but
does not record which pages are there: the step that publishes a boundary asks the tree whether it
was reached.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.tree import matching
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import Receipt, hold_host, release
from kvgraft.types import Tier
from kvgraft_storage import TRANSIENT, Status, StorageTicket
from kvgraft_storage.keys import HASH_NBYTES
from kvgraft_storage.tier.arriving import Arrival, arrive
from kvgraft_storage.tier.context import TierContext
from kvgraft_storage.tier.inventory import (
    ANY,
    Bounds,
    Mask,
    Plan,
    ShortOf,
    backed_on_host,
    lacking_pages,
    take_inventory,
)
from kvgraft_storage.tier.names import PageHashes, known_hashes
from kvgraft_storage.tier.naming import block_end
from kvgraft_storage.tier.slabs import Draining

__all__ = ["Fetch", "Phase"]

MAX_ROUNDS = 3
"""Times a fetch is planned again because found data did not come."""

PIECE_PAGES = 512
"""Pages that are inserted into the tree at once."""

ASKED_PAGES = 2048
"""Pages that are looked up or fetched at once: workers wait between two such calls."""

EVICTED_SLOTS = 64
"""Slots that room is made for at once."""

NO_SLOTS = np.zeros(0, dtype=np.int32)

Steps = Generator[None, None, None]
Planning = Generator[None, None, Plan | None]


class Phase(enum.Enum):
    """The phase of a fetch; see the module."""

    LOOKING = "looking"
    FETCHING = "fetching"
    HANGING = "hanging"
    ENDED = "ended"


class _Part(NamedTuple):
    """Pages of one component in a ticket: all slots of a page one behind the other."""

    component: TreeComponent
    pages: npt.NDArray[np.int64]


class Fetch:
    """Data of one sequence on its way from STORAGE to HOST; nothing happens before `begin`.

    Args:
        context: see there.
        key: the sequence.
        found: its match now.
        limit: the deepest boundary to fetch, in pages.
        threshold: fewer pages than this are not worth fetching (S2).
        spare: take only free HOST slots, without evictions.

    Attributes:
        start: the boundary it begins at, in pages (S1).
        anchor: the boundary that could be resumed from when it began, in pages.
        first: the first missing page, named by the node before it: another prefetch that needs it
            shares this one.
        boundary: the deepest one that it published; its anchor before that.
        key: the sequence; it may have grown since.
        asked, limit: the deepest requested boundary, in pages, and the deepest after planning.
        hashes: of the pages from `start` on, as far as they are known, 32 bytes each.
        nbytes: bytes of HOST it holds.
        planned: its first target boundary; 0 while that is unknown.
        capped: whether `prefetch_nbytes` cuts its target.
        shrunk: whether HOST memory was too small for the store's pages (S3).
        reason: why it ended, for people.
        short_of: why it brought nothing although the store has data; None otherwise.
        tip: the last node that it inserted into the tree, or the one it begins at.
        draining: slots that an abandoned call may still write to, after the fetch has ended.
        gap: a page that it could not pass, because the store lacks it; None if there is none.
        budget: bytes of HOST that all prefetches together may still take (S2).
        comes_after: whether an earlier prefetch waits for room: then it takes none.
        give_way: frees HOST data that is kept for younger prefetches; false if there is none.
        lacking: the components whose HOST pools were short.
        room: the bytes and, per component, the slots that were available when it was planned; after
            its end, including its own.
        receipt: pins the node it begins at, on HOST (S1).
        target: its current target boundary; 0 while that is unknown.
        rounds: ended calls that moved pages.
        parts: pages of the call under way, component by component.
        arrived: per component, bool `[n_pages]` from `start` on: pages that came.
        slots: per component, int32 `[n_pages, slots_per_page]`: HOST slots of these pages.
    """

    def __init__(
        self,
        context: TierContext,
        key: TokenKey,
        found: matching.Match,
        limit: int,
        threshold: int,
        *,
        spare: bool,
    ) -> None:
        self.context = context
        self.spare = spare
        tree = context.tree
        node = matching.anchor_node(tree, found)
        self.anchor = self.boundary = node.end
        self.key = TokenKey(namespace=key.namespace)
        key.shared, self.key.data = True, key.data  # of a key that is cut it stays as it was
        self.key.found_at(node, found.root)
        self.first = _page_behind(node, key, tree.page_bytes)
        while not backed_on_host(tree, node):
            assert node.parent is not None
            node = node.parent
        self.start, self.limit, self.asked = node.end, limit, limit
        self._least = self.anchor + threshold
        self._digest = context.naming.namespace(key.namespace)
        self.key.hashed = key.hashed
        self.hashes = bytearray()
        self.nbytes = self.planned = self.target = 0
        self.budget = 0
        self.comes_after = False
        self.give_way: Callable[[], bool] = lambda: False
        self.lacking: list[TreeComponent] = []
        self.room: list[int] = []
        self.gap: int | None = None
        self.capped = self.shrunk = False
        self.reason = ""
        self.short_of: ShortOf | None = None
        self.phase = Phase.ENDED
        self.draining: Draining | None = None
        self._found: list[Mask] = []
        self.arrived: list[Mask] = []
        self._wanted: list[Mask] = []
        self.slots: list[npt.NDArray[np.int32]] = []
        self._reserved: list[npt.NDArray[np.int32]] = []
        self.parts: list[_Part] = []
        self._ticket: StorageTicket | None = None
        self._lacked = [False for _ in tree.components]
        self.rounds = 0
        self._unknown: str | None = None
        self._store = context.client.store_number
        self.receipt: Receipt | None = None
        self._counted_on: Receipt | None = None
        self._tip_held: Receipt | None = None
        self.tip = node
        self._root = found.root
        self._steps: Steps = self._run()

    def begin(self) -> bool:
        """Pin where it starts; False, with a reason, if that is impossible (S1)."""
        tree = self.context.tree
        self.receipt = hold_host(tree, self.tip, self.start)
        if self.receipt is None:
            self.reason = "holding its prefix on HOST would take slots promised to requests"
            return False
        self._root = tree.hold_root(self.key.namespace)
        self.phase = Phase.LOOKING
        n_pages = self.limit - self.start
        for component in tree.components:
            self._found.append(np.zeros(n_pages, dtype=np.bool_))
            self.arrived.append(np.zeros(n_pages, dtype=np.bool_))
            self._wanted.append(np.zeros(n_pages, dtype=np.bool_))
            self.slots.append(np.zeros((n_pages, self._per_page(component)), dtype=np.int32))
            self._reserved.append(NO_SLOTS)
        return True

    def hand_names_to(self, key: TokenKey) -> None:
        """Give the key the names of its pages as they become known, for its nodes."""
        tree, versions = self.context.tree, self.context.naming.versions
        key.hashed = PageHashes(
            tree, key.namespace, self.start, self.hashes, versions, versions.number
        )

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.phase is Phase.ENDED

    @property
    def next(self) -> tuple[int, bytes]:
        """The page after those in the tree: another prefetch for it shares this one."""
        return _page_behind(self.tip, self.key, self.context.tree.page_bytes)

    def owners(self) -> list[tuple[Ledger, bytes]]:
        """HOST slots it holds, for integrity checks."""
        held = []
        for component, wanted, arrived in zip(
            self.context.tree.components, self._wanted, self.arrived
        ):
            held.append(
                (self._host(component), self.slots[component.index][wanted | arrived].tobytes())
            )
            held.append((self._host(component), self._reserved[component.index].tobytes()))
        return held

    @property
    def can_step(self) -> bool:
        """Whether there is work now, by the store's last poll."""
        return not self.ended and (self._ticket is None or _is_over(self._ticket))

    def step(self) -> None:
        """Do the next piece of work, for a fraction of a millisecond; call it if `can_step`."""
        next(self._steps, None)

    def _run(self) -> Steps:
        yield from self.context.naming.name(self.tip)
        yield from self._look()
        plan = yield from self._first_plan()
        if plan is None:
            self._end(self.reason)
            return
        reason = ""
        while plan is not None:
            if not (yield from self._fetch(plan)):
                reason = "the store did not answer in time"
                break
            self.rounds += 1
            plan = yield from self._next_plan()
        self.phase = Phase.HANGING
        yield
        yield from self._hang()
        if reason:
            self.stop(reason)
        else:
            self._end("")

    def receipts(self) -> list[Receipt]:
        """Its pins, for integrity checks."""
        held = (self._tip_held, self._counted_on, self.receipt)
        return [each for each in held if each is not None]

    # -- looking

    def _name(self, end: int) -> Steps:
        """Hash pages up to `end`, a block at a time."""
        naming = self.context.naming
        while (page := self.start + len(self.hashes) // HASH_NBYTES) < end:
            stop = min(block_end(page), end)
            known = known_hashes(self.key, self.context.tree, page, stop)
            if known:
                self.hashes += known
                continue
            parent = self.hashes[-HASH_NBYTES:] or naming.of(self.tip).hashes[-HASH_NBYTES:]
            self.hashes += naming.block(bytes(parent), self.key.data, page, page, stop)
            yield

    def _look(self) -> Steps:
        """Ask the store which missing pages it has; its answer is a hint.

        Where a component that needs every page lacks one, nothing behind it is of use.
        """
        tree, context, first = self.context.tree, self.context, self.start
        while first < self.limit:
            last = min(first + ASKED_PAGES, self.limit)
            yield from self._name(last)
            self.parts = []
            lacking = lacking_pages(tree, self.key, self.start, first, last)
            for component, mask in zip(tree.components, lacking):
                pages = np.flatnonzero(mask) + first
                if len(pages):
                    self._lacked[component.index] = True
                    self.parts.append(_Part(component, pages))
            asked = context.naming.asked(self.hashes, self.start, self.parts, self._digest)
            self._ticket = context.client.exists(asked, context.deadline_s)
            yield
            for part, has in self._take_statuses():
                self._found[part.component.index][part.pages[has] - self.start] = True
                if part.component.is_prefix_closed and not has.all():
                    self.limit = self.gap = min(self.limit, int(part.pages[~has][0]))
            self._ticket, self.parts = None, []
            first = last
            yield

    def _take_statuses(self) -> Iterator[tuple[_Part, Mask]]:
        """Per part of the ticket, bool `[n_pages]`: whether all slots of a page are OK."""
        assert self._ticket is not None
        at = 0
        for part in self.parts:
            n_keys = len(part.pages) * self._per_page(part.component)
            statuses = self._ticket.statuses[at : at + n_keys]
            at += n_keys
            if statuses.count(Status.OK) == n_keys:
                yield part, np.ones(len(part.pages), dtype=np.bool_)
                continue
            fine = np.array([status is Status.OK for status in statuses], dtype=np.bool_)
            if any(statuses.count(status) for status in TRANSIENT):
                waited = self._ticket.error or ""
                self._unknown = (
                    "the store had no time for it: waited too long in line"
                    if waited.endswith("in line")
                    else "the store did not answer in time or is down"
                )
            yield part, np.asarray(fine.reshape(len(part.pages), -1).all(axis=1))

    def _per_page(self, component: TreeComponent) -> int:
        return 1 if component.is_state else component.slots_per_page

    # -- planning

    def _plan(self, bounds: Bounds, least: int) -> Planning:
        """The deepest boundary there is room for, and the slots it takes."""
        tree, limit = self.context.tree, self.limit
        inventory = yield from take_inventory(
            tree, self.key, self._found, self.arrived, start=self.start, limit=limit
        )
        return (yield from inventory.deepest(bounds, least))

    def _plan_that_fits(self, least: int) -> Planning:
        """The deepest boundary that there is still room for when this is known."""
        for _ in range(MAX_ROUNDS):
            plan = yield from self._plan(self._bounds(), least)
            if plan is None or self._fits(plan, self._bounds()):
                return plan
        return None

    def _fits(self, plan: Plan, bounds: Bounds) -> bool:
        if bounds.n_slots is not None and any(n > m for n, m in zip(plan.n_slots, bounds.n_slots)):
            return False
        return bounds.nbytes is None or self._nbytes(plan.n_slots) <= bounds.nbytes

    def _bounds(self, rooms: Sequence[int] | None = None) -> Bounds:
        """The HOST slots that are free and not promised, within the budget."""
        if rooms is None:
            rooms = [self._host(component).spare for component in self.context.tree.components]
        return Bounds(rooms, self.budget, self.context.slabs.nbytes)

    def _first_plan(self) -> Planning:
        """Plan, make room once, plan again with the free slots (S3)."""
        longest = yield from self._plan(ANY, self._least)
        yield
        if longest is None:
            self._say_nothing_is_stored()
            return None
        self.planned = longest.boundary
        if self.comes_after:
            self.short_of = ShortOf.HOST
            self.reason = f"{self.short_of.value}: others that came before wait for room"
            return None
        wanted = yield from self._plan(self._bounds(self._note_room()), self._least)
        while wanted is None:
            yield from self._say_why_nothing()
            if self.short_of is not ShortOf.HOST or self.spare or not self.give_way():
                return None
            wanted = yield from self._plan(self._bounds(self._note_room()), self._least)
        yield
        self.short_of, self.reason, self.lacking = None, "", []
        if not self.spare:
            yield from self._ensure_free(wanted)
            yield
        self._note_room()
        plan = yield from self._plan_that_fits(self._least)
        self.shrunk = plan is None or plan.boundary < longest.boundary
        if plan is None:
            yield from self._say_why_nothing()
        return plan

    def _note_room(self) -> list[int]:
        """The HOST slots that can be had by eviction, per component."""
        rooms = self._headrooms()
        self.room = [self.budget, *rooms]
        return [max(0, room) for room in rooms]

    def _headrooms(self) -> list[int]:
        return [self._host(component).headroom for component in self.context.tree.components]

    def _ensure_free(self, plan: Plan) -> Steps:
        """Evict for a plan, but no data it relies on, which stays pinned until the fetch ends."""
        tree = self.context.tree
        path = matching.follow_key(tree, self.key, plan.boundary)
        there = [node for node in path.nodes if node.live_host]
        if there:
            self._counted_on = hold_host(tree, there[-1], plan.boundary)
        for component, n_slots in zip(tree.components, plan.n_slots):
            host = self._host(component)
            left = n_slots - host.room
            while left > 0:
                before = host.room
                wanted = before + min(left, EVICTED_SLOTS)
                self.context.evictor.ensure_free(component, Tier.HOST, wanted, self.tip.tenant)
                freed = host.room - before
                if freed <= 0:
                    break
                left -= freed
                yield

    def _next_plan(self) -> Planning:
        """The further slots of a shorter boundary, if pages did not arrive; else None."""
        if self.rounds >= MAX_ROUNDS:
            return None
        best = yield from self._plan(self._nothing, self.anchor + 1)
        reached = best.boundary if best is not None else self.anchor
        if reached >= self.target:
            return None
        return (yield from self._plan_that_fits(reached + 1))

    @property
    def _nothing(self) -> Bounds:
        return Bounds([0] * len(self.context.tree.components), None, self.context.slabs.nbytes)

    def _say_nothing_is_stored(self) -> None:
        """Why no boundary is worth it, with any room."""
        names = [
            component.name
            for component in self.context.tree.components
            if self._lacked[component.index] and not self._found[component.index].any()
        ]
        self.reason = "no boundary that is worth it is stored for all components"
        if self._unknown is not None:
            self.reason = self._unknown
        elif names:
            self.reason = f"nothing of {', '.join(names)} is stored"

    def _say_why_nothing(self) -> Steps:
        """Why there is no plan: nothing stored, or short of budget or room, which is noted."""
        self.short_of, self.lacking = None, []
        if (yield from self._plan(ANY, self._least)) is None:
            self._say_nothing_is_stored()
            return
        plan = yield from self._plan(self._bounds()._replace(n_slots=None), self._least)
        if plan is None:
            self.short_of = ShortOf.BUDGET
            self.reason = (
                f"{self.short_of.value}: {self.budget} bytes of HOST are left for prefetches"
            )
            return
        self.short_of = ShortOf.HOST
        needed = zip(self.context.tree.components, plan.n_slots)
        lacking = [(each, n) for each, n in needed if n > self._host(each).spare]
        # all, if room came since it was planned
        self.lacking = [component for component, _ in lacking] or [*self.context.tree.components]
        short = ", ".join(
            f"{component.name} needs {n} slots and has {self._host(component).spare}"
            for component, n in lacking
        )
        self.reason = f"{self.short_of.value}: {short}"

    def _nbytes(self, n_slots: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(n_slots, self.context.slabs.nbytes))

    # -- fetching

    def _fetch(self, plan: Plan) -> Generator[None, None, bool]:
        """Reserve the plan's slots, which are free, and fetch them; whether all came in time."""
        self.phase, self.target = Phase.FETCHING, plan.boundary
        for component, n_slots in zip(self.context.tree.components, plan.n_slots):
            slots = self._host(component).reserve(n_slots)
            assert slots is not None
            self._reserved[component.index] = np.frombuffer(slots, np.int32)
        self.nbytes += self._nbytes(plan.n_slots)
        for first in range(self.start, plan.boundary, ASKED_PAGES):
            self._ask(plan, first)
            yield
            assert self._ticket is not None
            in_time = self._ticket.done
            came = self._take_in()
            if not in_time:
                return False
            self._ticket, self.parts = None, []
            if not came:
                break
            yield
        self._free_wanted()
        yield  # the freed slots count for the budget
        return True

    def _ask(self, plan: Plan, first: int) -> None:
        """Fetch a plan's pages from `first` on."""
        context, low = self.context, first - self.start
        self.parts = []
        memory = []
        for component, mask in zip(context.tree.components, plan.pages):
            pages = np.flatnonzero(mask[low : low + ASKED_PAGES]) + low
            if len(pages):
                slots = self._place(component, pages)
                self.parts.append(_Part(component, pages + self.start))
                memory.append((component, slots))
        asked = context.naming.asked(self.hashes, self.start, self.parts, self._digest)
        self._ticket = context.client.get(asked, context.slabs.of(memory), context.deadline_s)

    def _place(
        self, component: TreeComponent, pages: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int32]:
        """Give reserved slots to some pages, counted from `start`."""
        reserved, n_slots = self._reserved[component.index], len(pages) * self._per_page(component)
        slots, self._reserved[component.index] = reserved[:n_slots], reserved[n_slots:]
        self.slots[component.index][pages] = slots.reshape(len(pages), -1)
        self._wanted[component.index][pages] = True
        return slots

    def _take_in(self) -> bool:
        """Sort the pages asked for into arrived and missing ones; whether all arrived.

        While the ticket is not done its memory may still be written to: only OK pages are sorted.
        """
        assert self._ticket is not None
        done, came = self._ticket.done, True
        for part, fine in self._take_statuses():
            index = part.component.index
            pages = part.pages - self.start
            open_ = self._wanted[index][pages]
            good = pages[fine & open_]
            self.arrived[index][good] = True
            self._wanted[index][good] = False
            came = came and bool(fine.all())
            bad = pages[~fine & open_]
            if done and len(bad):
                self._found[index][bad] = False
                mask = np.zeros_like(self._wanted[index])
                mask[bad] = True
                self._free(part.component, mask)
        return came

    # -- hanging

    def publish(self, steps: Iterator[object]) -> bool:
        """Insert arrived pages into the tree, while `steps` has more; whether all are inserted."""
        if self.phase is Phase.FETCHING and self._ticket is not None:
            self._take_in()
        hanging = self._hang()
        for _ in steps:
            try:
                next(hanging)
            except StopIteration:
                return True
        hanging.close()
        return False

    def _hang(self) -> Steps:
        """Hang arrived pages into the tree, up to the deepest boundary they make (S4, S5).

        Piece by piece; with the last one the tree is asked whether all components accept it.
        """
        for _ in range(MAX_ROUNDS):
            plan = yield from self._plan(self._nothing, self.boundary + 1)
            if plan is None:
                return
            while self.tip.end < plan.boundary:
                if not self._arrive(plan.boundary):
                    return
                if self.tip.end < plan.boundary:
                    yield
            if self._accepted(plan.boundary):
                self.reached(plan.boundary)
                return
            yield

    def _accepted(self, boundary: int) -> bool:
        """Whether every component can resume from a boundary, as the tree is now."""
        return matching.match(self.context.tree, self.key, boundary).anchor == boundary

    def reached(self, boundary: int) -> None:
        """A boundary is published: every component can resume from it (S4)."""
        self.boundary = boundary

    def _arrive(self, end: int) -> bool:
        """Hang a piece of the arrived pages up to page `end`, and pin it; whether one can go on."""
        tree = self.context.tree
        if self.tip.parent is None and self.tip.end:
            return False  # it was not held, and left the tree
        arrival = Arrival(self.key, self.hashes, self.start, self.arrived, self.slots, self._store)
        held = [host.in_flight for host in map(self._host, tree.components)]
        tip = arrive(tree, self.tip, end, arrival, PIECE_PAGES)
        taken = [before - self._host(t).in_flight for before, t in zip(held, tree.components)]
        self.nbytes -= self._nbytes(taken)
        before, self._tip_held = self._tip_held, hold_host(tree, tip)
        if before is not None:
            release(tree, before)
        if self._tip_held is None:
            tree.prune(tip)
            return False
        self.tip = tip
        self.key.found_at(tip, tree.root(self.key.namespace))
        return True

    # -- the end

    def wind_up(self, reason: str) -> None:
        """Fetch nothing more; arrived pages are inserted into the tree step by step."""
        self._give_up_ticket()
        self._free_wanted()
        self.phase = Phase.HANGING
        self._steps = self._finish(reason)

    def _finish(self, reason: str) -> Steps:
        yield from self._hang()
        self._end(reason)

    def stop(self, reason: str) -> None:
        """End now, without publishing more; slots that may still be written to drain (S5)."""
        if not self.ended:
            self._give_up_ticket()
            self._end(reason)

    def _give_up_ticket(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            return
        ticket.cancel()
        if self.phase is Phase.LOOKING or ticket.done:
            return
        slots, nbytes = [], 0
        for part in self.parts:
            index = part.component.index
            left = np.zeros_like(self._wanted[index])
            left[part.pages - self.start] = True
            left &= self._wanted[index]
            if left.any():
                own = self.slots[index][left]
                self._wanted[index] &= ~left
                slots.append((self._host(part.component), own.tobytes()))
                nbytes += own.size * self.context.slabs.nbytes[index]
        self.draining = Draining(ticket, slots, nbytes)
        self.nbytes -= nbytes

    def _end(self, reason: str) -> None:
        """Free the unpublished slots, once; give up the pins (S1, S2, S5)."""
        before = self._headrooms()
        self._free_wanted()
        for component, arrived in zip(self.context.tree.components, self.arrived):
            self._free(component, arrived)
        assert self.nbytes == 0, self.nbytes
        self.phase = Phase.ENDED
        self.reason = reason
        assert self.receipt is not None
        for receipt in (self._tip_held, self._counted_on, self.receipt):
            if receipt is not None:
                release(self.context.tree, receipt)
        # its own pins kept no room from it: they are no room that comes
        given_up = [now - then for now, then in zip(self._headrooms(), before)]
        self.room[1:] = [room + more for room, more in zip(self.room[1:], given_up)]
        self.context.tree.release_root(self._root)

    def _free_wanted(self) -> None:
        """Free the reserved slots whose data did not come."""
        for component, wanted in zip(self.context.tree.components, self._wanted):
            self._free(component, wanted)
            slots, self._reserved[component.index] = self._reserved[component.index], NO_SLOTS
            self._host(component).cancel(slots.tobytes())
            self.nbytes -= self.context.slabs.nbytes[component.index] * slots.size

    def _host(self, component: TreeComponent) -> Ledger:
        """The tenant's ledger of the component's HOST pool."""
        ledger = component.hosts[self.tip.tenant]
        assert ledger is not None
        return ledger

    def _free(self, component: TreeComponent, pages: Mask) -> None:
        """Slots of some pages become free, and the pages lose their state."""
        if not pages.any():
            return
        slots = self.slots[component.index][pages]
        self._host(component).cancel(slots.tobytes())
        self.nbytes -= self.context.slabs.nbytes[component.index] * slots.size
        others = ~pages
        self._wanted[component.index] &= others
        self.arrived[component.index] &= others


def _is_over(ticket: StorageTicket) -> bool:
    """Whether nothing more will come of a ticket in time; a worker may still be in the memory."""
    return ticket.settled and (ticket.done or Status.TIMEOUT in ticket.statuses)


def _page_behind(node: Node, key: TokenKey, page_bytes: int) -> tuple[int, bytes]:
    """A value that identifies a page among those looked for; the node stands for its prefix."""
    offset = node.end * page_bytes
    return node.ident, bytes(key.data[offset : offset + page_bytes])
