"""One prefetch at work: looked for, fetched into HOST, hung into the tree (S1 to S5).

    LOOKING ─► FETCHING ─► ENDED        a miss on the way fetches again what a shorter one takes

Memory is reserved once the store said what it has: for the deepest boundary that fits and that
every component can resume from. What came is published up to such a boundary, or not at all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from operator import itemgetter, le
from typing import NamedTuple

import numpy as np

from kvgraft.slots import SLOT_BYTES
from kvgraft.storage import TRANSIENT, Address, Status, StorageTicket
from kvgraft.storage_tier.inventory import Inventory, Plan, ShortOf, backed_on_host, take_inventory
from kvgraft.storage_tier.scene import Scene
from kvgraft.storage_tier.slabs import Draining
from kvgraft.tree import matching
from kvgraft.tree.arriving import Arrival, arrive
from kvgraft.tree.holding import hold_host, let_go_of_host
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.pinning import Receipt
from kvgraft.tree.track import Track

__all__ = ["Fetch", "Phase"]

MAX_ROUNDS = 3
"""Times a fetch is planned anew when something that was found did not come."""


class Phase(enum.Enum):
    """Where a fetch stands; see the module."""

    LOOKING = "looking"
    FETCHING = "fetching"
    ENDED = "ended"


class _Wanted(NamedTuple):
    """A page of one component on its way: its slots, and its first number in the ticket."""

    track: Track
    page: int
    slots: bytes
    number: int


class Fetch:
    """Data of one sequence on its way from STORAGE to HOST; nothing happens before `begin`.

    Args:
        scene: see there.
        key: the sequence; its tokens are copied.
        found: its match now.
        limit: the deepest boundary to go for, in pages.
        threshold: fewer pages than this are not worth fetching (S2).
        spare: take only what is free on HOST, evict nothing.

    Attributes:
        start: the boundary it begins at, in pages (S1).
        anchor: the boundary that could be resumed from when it began, in pages.
        boundary: the deepest one that it published; its anchor while it has not.
        hashes: of the pages from `start` on.
        nbytes: bytes of HOST it holds.
        planned: the boundary it went for at first; 0 while that is not known.
        shrunk: whether HOST memory was short of what the store has (S3).
        reason: why it ended, for people.
        short_of: what kept it from bringing anything, though the store has it; None otherwise.
        found: per component, pages the store says it has, once it has answered.
    """

    def __init__(
        self,
        scene: Scene,
        key: TokenKey,
        found: matching.Match,
        limit: int,
        threshold: int,
        *,
        spare: bool,
    ) -> None:
        self.scene = scene
        self.spare = spare
        tree = scene.tree
        node = matching.anchor_node(tree, found)
        self.anchor = self.boundary = node.end
        while not backed_on_host(tree, node):
            assert node.parent is not None
            node = node.parent
        self.start, self.limit = node.end, limit
        self._least = self.anchor + threshold
        self.key = TokenKey(namespace=key.namespace)
        self.key.data += key.data[: limit * tree.page_bytes]
        self._digest = scene.naming.namespace(key.namespace)
        self.hashes = scene.naming.of_key(key, node, limit)
        self.nbytes = self.planned = self._target = 0
        self.shrunk = False
        self.reason = ""
        self.short_of: ShortOf | None = None
        self.phase = Phase.ENDED
        self.found: list[set[int]] = [set() for _ in tree.tracks]
        self._arrived: list[dict[int, bytes]] = [{} for _ in tree.tracks]
        self._wanted: list[_Wanted] = []
        self._rounds = 0
        self._unknown = False
        self._ticket: StorageTicket
        self._store = scene.storage.store_number
        self._receipt: Receipt | None = None
        self._counted_on: Receipt | None = None
        self._node = node

    def begin(self) -> bool:
        """Pin where it starts and ask the store; False, with a reason, if that cannot be (S1)."""
        tree = self.scene.tree
        self._receipt = hold_host(tree, self._node, self.start)
        if self._receipt is None:
            self.reason = "holding its prefix on HOST would take slots promised to requests"
            return False
        tree.hold(self.key.namespace)
        self.phase = Phase.LOOKING
        self._look()
        return True

    @property
    def first_hash(self) -> bytes:
        """The hash of the first page that cannot be resumed from: who wants it shares this."""
        return self.hashes[self.anchor - self.start]

    @property
    def ended(self) -> bool:
        """Whether nothing more will come of it."""
        return self.phase is Phase.ENDED

    def owners(self) -> list[tuple[Ledger, bytes]]:
        """HOST slots it holds, for integrity checks."""
        held = [(each.track, each.slots) for each in self._wanted]
        for track, pages in zip(self.scene.tree.tracks, self._arrived):
            held += [(track, slots) for slots in pages.values()]
        return [(_host(track), slots) for track, slots in held]

    # -- looking

    def _look(self) -> None:
        """Ask the store for each page that is lacking; what it says is a hint."""
        inventory = self._inventory()
        self._asked: list[tuple[set[int], int]] = []
        addresses: list[Address] = []
        for track, mask in zip(self.scene.tree.tracks, inventory.lacking):
            lacking = np.flatnonzero(mask[self.start - inventory.first :]) + self.start
            pages = lacking.tolist()
            self.found[track.index].update(pages)
            for of_a_slot in self._addresses(track, pages):
                self._asked += [(self.found[track.index], page) for page in pages]
                addresses += of_a_slot
        self._ticket = self.scene.storage.exists(addresses, self.scene.deadline_s)

    def _addresses(self, track: Track, pages: Sequence[int]) -> list[list[Address]]:
        hashes = [self.hashes[page - self.start] for page in pages]
        return self.scene.naming.addresses(hashes, track, self._digest)

    def _inventory(self) -> Inventory:
        """What the tree lacks now, which others may have changed since the fetch began."""
        tree = self.scene.tree
        anchor = matching.match(tree, self.key, self.limit).anchor
        return take_inventory(tree, self.key, start=self.start, anchor=anchor, limit=self.limit)

    # -- going on

    def step(self, budget: int) -> Draining | None:
        """Take in what has come, as of the store's last poll; never waits.

        Args:
            budget: bytes of HOST that all prefetches together may still take (S2).

        Returns:
            Slots that a call may still write to that has outlasted its deadline.
        """
        if not self._ticket.settled:
            return None
        if self.phase is Phase.LOOKING:
            self._take_hints()
            self._begin(budget)
        elif not self._ticket.done:
            self.publish()
            return self.stop("the store did not answer in time")
        else:
            held = self.nbytes
            self._take_in()
            self._go_on(budget + held - self.nbytes)
        return None

    def _take_hints(self) -> None:
        for (found, page), status in zip(self._asked, self._ticket.statuses):
            if status is not Status.OK:
                found.discard(page)
                self._unknown = self._unknown or status in TRANSIENT
        self._asked = []

    def _begin(self, budget: int) -> None:
        """Plan, make room once, plan again with what there is, reserve, fetch (S3)."""

        def could_fit(n_slots: Sequence[int]) -> bool:
            rooms = [max(0, _host(track).headroom) for track in self.scene.tree.tracks]
            return self._nbytes(n_slots) <= budget and all(map(le, n_slots, rooms))

        wanted = self._plan(could_fit, self._least)
        longest = self._plan(lambda n_slots: True, self._least)
        if wanted is None or longest is None:
            self._end(self._why_nothing(budget))
            return
        if not self.spare:
            self._make_room(wanted)
        plan = self._plan(
            lambda n_slots: self._nbytes(n_slots) <= budget and self._has_room(n_slots),
            self._least,
        )
        self.planned = longest.boundary
        self.shrunk = plan is None or plan.boundary < longest.boundary
        if plan is None:
            self._end(self._why_nothing(budget))
            return
        self._fetch(plan)

    def _make_room(self, plan: Plan) -> None:
        """Evict for a plan, and not what it counts on; nor may others until the fetch has ended."""
        tree = self.scene.tree
        path = matching.follow(tree, tree.root(self.key.namespace), self.key.data, plan.boundary)
        there = [node for node in path.nodes if node.live_host]
        if there:
            self._counted_on = hold_host(tree, there[-1], plan.boundary)
        for track, n_slots in zip(tree.tracks, plan.n_slots):
            self.scene.room.on_host(track, n_slots)

    def _plan(self, fits: Callable[[Sequence[int]], bool], least: int) -> Plan | None:
        return self._inventory().deepest(self.found, self._arrived, fits, least)

    def _why_nothing(self, budget: int) -> str:
        """Why there is no plan: nothing stored, or short of budget or room, which is noted."""
        if self._plan(lambda n_slots: True, self._least) is None:
            if self._unknown:
                return "the store did not answer in time or is down"
            lacking = self._inventory().lacking
            names = [
                track.name
                for track, pages in zip(self.scene.tree.tracks, self.found)
                if not pages and lacking[track.index].any()
            ]
            if names:
                return f"nothing of {', '.join(names)} is stored"
            return "no boundary that is worth it is stored for all components"
        plan = self._plan(lambda n_slots: self._nbytes(n_slots) <= budget, self._least)
        if plan is None:
            self.short_of = ShortOf.BUDGET
            return f"{self.short_of.value}: {budget} bytes of HOST are left for prefetches"
        self.short_of = ShortOf.HOST
        short = ", ".join(
            f"{track.name} needs {n} slots and has {_host(track).spare}"
            for track, n in zip(self.scene.tree.tracks, plan.n_slots)
            if n > _host(track).spare
        )
        return f"{self.short_of.value}: {short}"

    def _has_room(self, n_slots: Sequence[int]) -> bool:
        return all(n <= _host(track).spare for track, n in zip(self.scene.tree.tracks, n_slots))

    def _nbytes(self, n_slots: Sequence[int]) -> int:
        return sum(n * size for n, size in zip(n_slots, self.scene.slabs.nbytes))

    # -- fetching

    def _fetch(self, plan: Plan) -> None:
        """Reserve what the plan takes, which is free, and ask for it in the order of pages."""
        self.phase, self._target = Phase.FETCHING, plan.boundary
        order: list[tuple[int, int, Track, tuple[Address, ...], bytes]] = []
        for track, pages, n_slots in zip(self.scene.tree.tracks, plan.pages, plan.n_slots):
            slots = _host(track).reserve(n_slots)
            assert slots is not None
            size = len(slots) // max(1, len(pages))
            for number, mine in enumerate(zip(*self._addresses(track, pages))):
                own = slots[number * size : (number + 1) * size]
                order.append((pages[number], track.index, track, mine, own))
        order.sort(key=itemgetter(0, 1))
        addresses: list[Address] = []
        buffers: list[memoryview] = []
        for page, _, track, mine, own in order:
            self._wanted.append(_Wanted(track, page, own, len(addresses)))
            addresses += mine
            buffers += self.scene.slabs.of(track, own)
        self.nbytes += self._nbytes(plan.n_slots)
        self._ticket = self.scene.storage.get(addresses, buffers, self.scene.deadline_s)

    def _take_in(self) -> list[_Wanted]:
        """Sort what was asked for into what arrived and what did not; returns the undecided."""
        undecided: list[_Wanted] = []
        for each in self._wanted:
            n = len(each.slots) // SLOT_BYTES
            statuses = self._ticket.statuses[each.number : each.number + n]
            if all(status is Status.OK for status in statuses):
                self._arrived[each.track.index][each.page] = each.slots
            elif None in statuses or not self._ticket.done:
                undecided.append(each)
            else:
                self._unknown = self._unknown or not TRANSIENT.isdisjoint(statuses)
                self.found[each.track.index].discard(each.page)
                self._free(each.track, each.slots)
        self._wanted = []
        return undecided

    def _go_on(self, budget: int) -> None:
        """Publish; where something did not come, fetch what a shorter boundary takes besides."""
        self._rounds += 1
        best = self._plan(lambda n_slots: not any(n_slots), 1)
        reached = best.boundary if best is not None else self.anchor
        if reached < self._target and self._rounds < MAX_ROUNDS:
            plan = self._plan(
                lambda n_slots: self._nbytes(n_slots) <= budget and self._has_room(n_slots),
                reached + 1,
            )
            if plan is not None:
                self._fetch(plan)
                return
        self.publish()
        self._end("")

    def publish(self) -> int:
        """Hang what arrived into the tree, up to the deepest boundary it makes; that boundary.

        May be called while more is on its way.
        """
        if self.phase is not Phase.FETCHING:
            return self.boundary
        undecided = self._take_in()
        plan = self._plan(lambda n_slots: not any(n_slots), 1)
        if plan is not None:
            assert self._receipt is not None
            tree = self.scene.tree
            tokens = bytes(self.key.data[: plan.boundary * tree.page_bytes])
            held = [len(pages) for pages in self._arrived]
            arrival = Arrival(tokens, self.hashes, self.start, self._arrived, self._store)
            arrive(tree, self._receipt.anchor, arrival)
            taken = [before - len(pages) for before, pages in zip(held, self._arrived)]
            self.nbytes -= self._nbytes(
                [n if t.is_state else n * t.slots_per_page for n, t in zip(taken, tree.tracks)]
            )
            self.boundary = max(self.boundary, plan.boundary)
        self._wanted = undecided
        return self.boundary

    def stop(self, reason: str) -> Draining | None:
        """End now, without publishing more; what may still be written to is returned (S5)."""
        if self.ended:
            return None
        self._ticket.cancel()
        draining = None
        if self.phase is Phase.FETCHING and not self._ticket.done:
            left = self._take_in()
            slots = [(_host(each.track), each.slots) for each in left]
            nbytes = sum(
                self.scene.slabs.nbytes[each.track.index] * len(each.slots) // SLOT_BYTES
                for each in left
            )
            draining = Draining(self._ticket, slots, nbytes)
            self.nbytes -= nbytes
        self._end(reason)
        return draining

    def _end(self, reason: str) -> None:
        """Free what was not published, once; give up the pins (S1, S2, S5)."""
        for each in self._wanted:
            self._free(each.track, each.slots)
        for track, pages in zip(self.scene.tree.tracks, self._arrived):
            for slots in pages.values():
                self._free(track, slots)
            pages.clear()
        self._wanted = []
        assert self.nbytes == 0, self.nbytes
        self.phase = Phase.ENDED
        self.reason = reason
        assert self._receipt is not None
        for receipt in (self._counted_on, self._receipt):
            if receipt is not None:
                let_go_of_host(self.scene.tree, receipt)
        self.scene.tree.let_go(self.key.namespace)

    def _free(self, track: Track, slots: bytes) -> None:
        _host(track).cancel(slots)
        self.nbytes -= self.scene.slabs.nbytes[track.index] * len(slots) // SLOT_BYTES


def _host(track: Track) -> Ledger:
    assert track.host is not None
    return track.host
