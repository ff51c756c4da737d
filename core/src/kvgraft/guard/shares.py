"""Whether what a request reads and leaves behind is what it computed (I1 to I7, L6, T9, M8).

A request's slots are read page by page, from its runs and the tree's nodes, before and after each
of its operations, and now and then after others'.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft.guard.paths import NONE, Shelf, deepest, look, needed, slots_of
from kvgraft.pools import DevicePool
from kvgraft.request import Request
from kvgraft.slots import SLOT_BYTES
from kvgraft.tree.node import Node
from kvgraft.tree.track import Track

if TYPE_CHECKING:
    from kvgraft.cache import Cache

__all__ = ["Offer", "Shares", "States"]

Table = npt.NDArray[np.int32]

OTHERS_AT_A_TIME = 2
"""Requests whose slots are compared after an operation of somebody else."""


class _Seen(NamedTuple):
    """A request's slots when they were read last."""

    request: Request
    tables: dict[int, Table]


class Offer(NamedTuple):
    """What a request has to share.

    Attributes:
        anchor: the boundary it is anchored at, in pages.
        best: the boundary that can be cached.
        at_least: the same if a state that is due finds no slot.
        before: what the tree had of its sequence, and its slots by component.
        own: its own slots by component.
        states: its states by component, by boundary.
        had: boundaries at which the tree had a state, by component.
        due: the boundary at which its live states are due as checkpoints; 0 if none.
        whole: whether everything the reaches need at `best` is there.
        declined: checkpoints declined so far.
    """

    anchor: int
    best: int
    at_least: int
    before: dict[int, Table]
    own: dict[int, Table]
    states: dict[int, dict[int, bytes]]
    had: list[set[int]]
    due: int
    whole: bool
    declined: int


class States(NamedTuple):
    """A request's states of one component before an allocation."""

    live: bytes | None
    captured: frozenset[int]
    tracked_page: int
    due: int
    due_is_checkpoint: bool


class Shares:
    """Checks what the requests of one cache own and share.

    Attributes:
        follows: whether every operation is looked at, so that a request's slots are known from one
            to the next.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self.tree = cache.tree
        self._paged = [track for track in cache.tree.tracks if not track.is_state]
        self.follows = True
        self._seen: dict[int, _Seen] = {}
        self._turn = 0

    # -- slots a request reads

    def _read(self, request: Request) -> dict[int, Table]:
        """Per paged component, a slot for each page up to what is allocated; -1 for none."""
        path: list[Node] = []
        node = request.receipt.anchor
        while node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        tables = {}
        for track in self._paged:
            segment = request.receipt.segments[track.index]
            size = track.slots_per_page
            parts: list[bytes] = []
            for node in path:
                slots = node.cells[track.index].device
                if slots is None or not any(
                    low < node.end and node.start < high for low, high in segment
                ):
                    slots = NONE * ((node.end - node.start) * size)
                parts.append(slots)
            page = request.receipt.anchor.end
            for run in request.runs[track.index] if request.runs else ():
                parts += [NONE * ((run.first - page) * size), run.device]
                page = run.end
            parts.append(NONE * ((request.allocated - page) * size))
            tables[track.index] = np.frombuffer(b"".join(parts), np.int32)
        return tables

    def remember(self, request: Request) -> None:
        """The request's slots are as they should be now."""
        self._note(request, self._read(request))

    def _note(self, request: Request, tables: dict[int, Table]) -> None:
        if self.follows:
            self._seen[id(request)] = _Seen(request, tables)

    def forget(self, request: Request) -> None:
        """It ended."""
        self._seen.pop(id(request), None)

    def check_others(self, but: Request | None) -> None:
        """What other requests read stays what it is (I4, T10, L5, M7)."""
        requests = [each for each in self.cache.requests.values() if each is not but]
        if not self.follows:
            return
        for _ in range(min(OTHERS_AT_A_TIME, len(requests))):
            self._turn = (self._turn + 1) % len(requests)
            request = requests[self._turn]
            seen = self._seen.get(id(request))
            if seen is not None and seen.request is request:
                self._compare(request, seen.tables, self._read(request))
            self.remember(request)

    def _compare(
        self, request: Request, was: dict[int, Table], now: dict[int, Table]
    ) -> dict[int, Table]:
        """Slots that were there are there still; the later table, cut to the earlier's length."""
        cut = {}
        for track in self._paged:
            before = was[track.index]
            after = cut[track.index] = now[track.index][: len(before)]
            if len(after) < len(before) or np.any((before != after) & (before >= 0)):
                pages = np.flatnonzero(before[: len(after)] != after) // track.slots_per_page
                first = int(pages[0]) if len(pages) else len(after) // track.slots_per_page
                gone = len(after) < len(before) or after[first * track.slots_per_page] < 0
                raise ContractViolation(
                    "I4" if not gone else "M7",
                    track.name,
                    f"{_of(request)} reads page {first} {'no longer' if gone else 'elsewhere'}; "
                    f"{len(pages)} slots changed",
                )
        return cut

    def allocated(self, request: Request) -> None:
        """Pages that had slots keep them, the others have new ones (A1, T9)."""
        seen, now = self._seen.get(id(request)), self._read(request)
        if seen is not None and seen.request is request:
            self._compare(request, seen.tables, now)
            for track in self._paged:
                stored = track.stored_between(0, request.allocated) * track.slots_per_page
                fresh = now[track.index][len(seen.tables[track.index]) : stored]
                if np.any(fresh < 0) or len(np.unique(fresh)) < len(fresh):
                    raise ContractViolation(
                        "T9",
                        track.name,
                        f"{_of(request)} is given {len(np.unique(fresh))} slots for "
                        f"{len(fresh) // track.slots_per_page} pages",
                    )
        self._note(request, now)

    def computed(self, request: Request, before: int) -> None:
        """Given up is what bounded reaches left behind (L6), and all of it (I3)."""
        seen, now = self._seen.get(id(request)), self._read(request)
        size = self.tree.page_size
        page = request.computed // size
        if seen is not None and seen.request is request:
            for track in self._paged:
                was, held = seen.tables[track.index], now[track.index]
                n_pages = len(held) // track.slots_per_page
                ahead = np.zeros(n_pages, np.bool_)
                ahead[page:] = True
                for low, high in needed(track, page, size):
                    ahead[low:high] = True
                wanted = np.repeat(ahead, track.slots_per_page)
                if len(was) != len(held) or np.any((was != held) & wanted & (was >= 0)):
                    raise ContractViolation(
                        "L6",
                        track.name,
                        f"{_of(request)} stands at page {page} and gave up pages that its reach "
                        f"{needed(track, page, size)} covers",
                    )
                own = slice(request.receipt.anchor.end * track.slots_per_page, None)
                if page > before and np.any((held >= 0)[own] & ~wanted[own]):
                    raise ContractViolation(
                        "I3",
                        track.name,
                        f"{_of(request)} stands at page {page} and keeps slots of its own before "
                        f"its reach {needed(track, page, size)}",
                    )
        self._check_slid(request, page)
        self._note(request, now)

    def _check_slid(self, request: Request, page: int) -> None:
        """Pins still cover what the reach needs of the prefix (L3)."""
        anchor = request.receipt.anchor
        for track in self._paged:
            segment = request.receipt.segments[track.index]
            for low, high in needed(track, page, self.tree.page_size):
                end = min(high, anchor.end)
                if low < end and not any(a <= low and end <= b for a, b in segment):
                    if anchor.end < page and self._left_earlier(request, track, low, end):
                        continue
                    raise ContractViolation(
                        "L3",
                        track.name,
                        f"{_of(request)} stands at page {page}, needs pages [{low}, {end}) and "
                        f"pins {segment}",
                    )

    def _left_earlier(self, request: Request, track: Track, low: int, end: int) -> bool:
        """Whether it never held those pages: a match pins what the anchor needs, no more."""
        wanted = needed(track, request.anchor_tokens // self.tree.page_size, self.tree.page_size)
        del end
        return not any(start <= low for start, _ in wanted)

    # -- what is shared

    def offer(self, request: Request, *, ending: bool) -> Offer:
        """What a checkpoint or an end has to offer (I6, I7)."""
        size = self.tree.page_size
        self._check_namespace(request)
        anchor, page = request.receipt.anchor.end, request.computed // size
        best = at_least = page
        states: dict[int, dict[int, bytes]] = {}
        for track in self.tree.tracks:
            own = request.states[track.index]
            if own is None:
                continue
            mine = dict(own.captured)
            sure = max(mine, default=0)
            if ending and not request.computed % size and own.live is not None:
                mine[page] = own.live
                sure = page
            elif ending and own.tracked is not None:
                mine.setdefault(own.tracked_page, own.tracked)
                sure = max(mine)
            deep = max(sure, own.due) if not ending and own.due_is_checkpoint else sure
            states[track.index] = mine
            best, at_least = min(best, deep), min(at_least, sure)
        shelf = look(self.tree, request.key, page)
        before = {
            track.index: np.frombuffer(slots_of(shelf, track, anchor, page), np.int32)
            for track in self._paged
        }
        table = self._read(request)
        own_slots = {
            track.index: table[track.index][
                anchor * track.slots_per_page : page * track.slots_per_page
            ]
            for track in self._paged
        }
        due = [own.due for own in request.states if own is not None and own.due_is_checkpoint]
        return Offer(
            anchor,
            best,
            at_least,
            before,
            own_slots,
            states,
            shelf.states[0],
            0 if ending else max(due, default=0),
            self._is_whole(request, table, shelf, best),
            self.cache.declined_checkpoints,
        )

    def _check_namespace(self, request: Request) -> None:
        """What it shares goes into its own namespace's tree (T11)."""
        node = request.receipt.anchor
        while node.parent is not None:
            node = node.parent
        if self.tree.roots.get(request.key.namespace) is not node:
            raise ContractViolation(
                "T11",
                None,
                f"{_of(request)} of namespace {request.key.namespace!r} is anchored in another's "
                "tree",
            )

    def _is_whole(
        self, request: Request, table: dict[int, Table], shelf: Shelf, boundary: int
    ) -> bool:
        """Whether a request has, or the tree has, what all reaches need at a boundary."""
        for track in self._paged:
            theirs = np.frombuffer(slots_of(shelf, track, 0, boundary), np.int32)
            mine = table[track.index][: len(theirs)]
            there = (theirs >= 0) | (mine >= 0)
            for low, high in needed(track, boundary, self.tree.page_size):
                if not there[low * track.slots_per_page : high * track.slots_per_page].all():
                    return False
        return True

    def check_shared(self, request: Request, offer: Offer, end: int, *, evicted: bool) -> None:
        """What was shared is in the tree, in the slots it was computed in (I1, I2, I6, I7).

        Args:
            request: the request.
            offer: what it had to share.
            end: the boundary shared up to, in pages.
            evicted: whether room was made meanwhile, which may have taken what the tree had.
        """
        if end not in (max(offer.anchor, offer.best), max(offer.anchor, offer.at_least)):
            raise ContractViolation(
                "I6",
                None,
                f"{_of(request)} is cached up to page {end}; all components can up to {offer.best}",
            )
        if end <= offer.anchor:
            return
        shelf = look(self.tree, request.key, end)
        if offer.whole and end == offer.best:
            there = deepest(self.tree, shelf, end, device_only=True)
            if there != end:
                raise ContractViolation(
                    "I7" if self.tree.has_state else "I6",
                    None,
                    f"{_of(request)} is cached up to page {end}, where only {there} pages can be "
                    "resumed from",
                )
        for track in self._paged:
            n_slots = (end - offer.anchor) * track.slots_per_page
            held = np.frombuffer(slots_of(shelf, track, offer.anchor, end), np.int32)
            before, own = offer.before[track.index][:n_slots], offer.own[track.index][:n_slots]
            wanted = np.where(before >= 0, before, own)
            good = held == wanted
            if evicted:
                good |= held == own
            if not good.all():
                page = offer.anchor + int(np.flatnonzero(~good)[0]) // track.slots_per_page
                raise ContractViolation(
                    "I1",
                    track.name,
                    f"page {page} of {_of(request)} is in slot {held[~good][0]} now; the tree had "
                    f"{before[~good][0]}, the request {own[~good][0]}",
                )
        for index, mine in offer.states.items():
            self._check_donated(request, index, shelf, mine, (offer.anchor, end))
        for node in shelf.nodes if offer.due else ():
            if node.end == offer.due:
                self._check_captured(request, node, offer)
        self._check_backed_up(shelf, offer)

    def _check_captured(self, request: Request, node: Node, offer: Offer) -> None:
        """A state that was due and is the tree's now is what the live one is still (I7)."""
        for index, own in enumerate(request.states):
            shared = node.cells[index].device
            if own is None or own.live is None or shared is None or node.end in offer.had[index]:
                continue
            pool = self.cache.mounted[index].component.device
            what = f"what {_of(request)} shares at page {node.end} is"
            self._check_copy("I7", self.tree.tracks[index], pool, own.live, shared, what)

    def _check_backed_up(self, shelf: Shelf, offer: Offer) -> None:
        """Under write-through what was gained is on its way to HOST, if there is room (B6, B7)."""
        if (
            self.cache.config.write_policy is not WritePolicy.WRITE_THROUGH
            or not self.cache.mirroring.enabled
        ):
            return
        above_is_backed = True
        for node in shelf.nodes:
            lacking = [
                track
                for track, cell in zip(self.tree.tracks, node.cells)
                if track.host is not None
                and cell.device is not None
                and cell.host is None
                and cell.incoming is None
            ]
            if lacking and above_is_backed and self._gained(node, lacking, offer):
                room = all(
                    track.host is not None and track.host.free >= track.n_slots(node)
                    for track in lacking
                )
                backed = any(cell.host is not None or cell.incoming for cell in node.cells)
                spare = all(track.device.headroom >= 0 for track in self.tree.tracks)
                if room and spare:
                    raise ContractViolation(
                        "B7" if backed else "B6",
                        lacking[0].name,
                        f"{node!r} gained data that is not backed up; HOST has "
                        f"{[track.host.free for track in lacking if track.host is not None]} free "
                        f"slots, {[track.n_slots(node) for track in lacking]} are needed",
                    )
                return
            base = node.cells[0]
            above_is_backed = base.host is not None or base.incoming is not None

    def _gained(self, node: Node, lacking: list[Track], offer: Offer) -> bool:
        """Whether one of the components had nothing on a node that is new since an offer."""
        if node.start < offer.anchor:
            return False
        for track in lacking:
            if not track.is_state:
                low = (node.start - offer.anchor) * track.slots_per_page
                high = (node.end - offer.anchor) * track.slots_per_page
                if (offer.before[track.index][low:high] < 0).all():
                    return True
        return False

    def _check_donated(
        self,
        request: Request,
        index: int,
        shelf: Shelf,
        mine: dict[int, bytes],
        inserted: tuple[int, int],
    ) -> None:
        """Every state on the pages that were inserted is the tree's (I7)."""
        track, (anchor, end) = self.tree.tracks[index], inserted
        whole = {
            node.end: node.cells[index].device
            for node in shelf.nodes
            if all(node.cells[each.index].device is not None for each in self._paged)
        }
        for page in mine:
            if anchor < page <= end and page in whole and whole[page] is None:
                raise ContractViolation(
                    "I7",
                    track.name,
                    f"{_of(request)} had a state at page {page} and is cached up to {end} without",
                )

    # -- states

    def states(self, request: Request) -> dict[int, States]:
        """Its states by component, before an operation."""
        found = {}
        for track in self.tree.tracks:
            own = request.states[track.index] if request.states else None
            if own is not None:
                found[track.index] = States(
                    own.live,
                    frozenset(own.captured),
                    own.tracked_page,
                    own.due,
                    own.due_is_checkpoint,
                )
        return found

    def check_kept(self, request: Request, was: dict[int, States]) -> None:
        """States that were set up or kept are copies of what they say (M8, I7)."""
        for index, before in was.items():
            own = request.states[index]
            if own is None or own.live is None:
                continue
            track = self.tree.tracks[index]
            pool = self.cache.mounted[index].component.device
            anchor = request.receipt.anchor
            source = anchor.cells[index].device
            if before.live is None and anchor.parent is not None and source is not None:
                self._check_copy("M8", track, pool, source, own.live, f"{_of(request)} begins with")
            for page, slot in own.captured.items():
                if page not in before.captured:
                    self._check_copy(
                        "I7", track, pool, own.live, slot, f"what is captured at page {page} is"
                    )
            if own.tracked is not None and own.tracked_page != before.tracked_page:
                self._check_copy(
                    "I7",
                    track,
                    pool,
                    own.live,
                    own.tracked,
                    f"what is kept at page {own.tracked_page} is",
                )
            ledger = track.device
            due = before.due if before.due_is_checkpoint and before.live is not None else 0
            promised = request.accounts[index].promised if request.accounts else 0
            lost = due > anchor.end and own.due != due and due not in own.captured
            if lost and (promised > 0 or ledger.headroom > 0):
                raise ContractViolation(
                    "I7",
                    track.name,
                    f"the state due at page {due} of {_of(request)} is not kept with "
                    f"{promised} slots promised",
                )

    def _check_copy(
        self, rule: str, track: Track, pool: DevicePool, source: bytes, copy: bytes, what: str
    ) -> None:
        if not self.cache.config.payload:
            return
        read, into = (int.from_bytes(slot, "little") for slot in (source, copy))
        for spec, lanes in zip(pool.specs, pool.lanes):
            if not bool((lanes[read] == lanes[into]).all()):
                raise ContractViolation(
                    rule,
                    track.name,
                    f"{what} slot {into}, which is no copy of slot {read}: plane {spec.name!r} of "
                    f"layer {spec.layer} differs",
                )

    def check_due(self, request: Request, ahead: list[int]) -> None:
        """A state at a boundary where it is to be captured is due there (I6, I7)."""
        page, rest = divmod(request.computed, self.tree.page_size)
        for index, states in self.states(request).items():
            wanted = (0, False)
            if not rest and page in ahead:
                wanted = (page, True)
            elif not rest and request.computed >= request.prompt and request.total > request.prompt:
                wanted = (page, False)
            if (states.due, states.due_is_checkpoint and bool(states.due)) != wanted:
                raise ContractViolation(
                    "I7",
                    self.tree.tracks[index].name,
                    f"{_of(request)} stands at {request.computed} tokens, where the state due is "
                    f"that of page {states.due}, as a checkpoint: {states.due_is_checkpoint}; "
                    f"wanted is {wanted}",
                )


def _of(request: Request) -> str:
    return f"the request of {request.prompt} tokens"


assert np.dtype(np.int32).itemsize == SLOT_BYTES
