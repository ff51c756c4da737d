"""Checks that a request reads and publishes its own data (I1 to I12, L6, T9, M8).

A request's slots are read page by page, from its runs and the tree's nodes, before and after each
of its operations, and sometimes after others'.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraft.cache import Cache
from kvgraft.config import WritePolicy
from kvgraft.errors import ContractViolation
from kvgraft.policies.policy import is_left_behind
from kvgraft.pools import DevicePool
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.components import DECODED, Due
from kvgraft.requests.request import CLOSED, Request
from kvgraft.requests.tables import state_number
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.node import Node
from kvgraft_guard.decoding import decode_pages, reached_from
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.paths import Shelf, deepest, is_root_of, look, needed
from kvgraft_guard.published import SMALL_TOKENS, PublishedData, SequenceSlots

if TYPE_CHECKING:
    from kvgraft.requests.components import Account

__all__ = ["Offer", "Shares", "Spare", "States"]

Table = npt.NDArray[np.int32]

OTHERS_AT_A_TIME = 2
"""Requests whose slots are compared after an operation of another request."""


class _Seen(NamedTuple):
    """A request's slots when they were read last."""

    request: Request
    tables: dict[int, Table]


class Offer(NamedTuple):
    """Data that a request has to share.

    Attributes:
        cached: the boundary up to which it has shared everything already, in pages.
        best: the deepest boundary that can be cached.
        at_least: the same if a due state finds no slot.
        left: its own pages and states, and the tree's.
        states: its states by component, by boundary, with those an end donates.
        due: the boundary at which its live states are due as checkpoints; 0 if none.
        whole: whether everything the reaches need at `best` is there.
        declined: checkpoints declined so far.
        published: whether the tree got pages of it that no backup was started for.
        spare: by component, DEVICE slots that are unpromised and that no due state takes.
        renewed: how many the request is promised again after it shared all its own.
        n_failed: transfers that could not be submitted so far.
    """

    cached: int
    best: int
    at_least: int
    left: SequenceSlots
    states: dict[int, dict[int, bytes]]
    due: int
    whole: bool
    declined: int
    published: bool
    spare: list[int]
    renewed: list[int]
    n_failed: int

    @property
    def anything(self) -> bool:
        """Whether the request holds pages of its own before the boundary that is sure."""
        return any((own[: self.at_least, 0] >= 0).any() for own in self.left.own.values())


class States(NamedTuple):
    """A request's states of one component before an allocation, and the slots it is promised."""

    live: bytes | None
    captured: frozenset[int]
    tracked_page: int
    due: int
    due_as: Due
    promised: int

    @property
    def must_be_kept(self) -> bool:
        """Whether the due state is a resume point that was promised its slot."""
        return self.due_as is Due.POINT and self.promised > 0


class Spare(NamedTuple):
    """Whether every state pool has an unpromised slot, and a free one."""

    slot: bool
    free_slot: bool


class Shares:
    """Checks the slots that the requests of one cache own and share.

    Attributes:
        follows: whether every operation is checked, so that a request's slots are known from one to
            the next.
    """

    def __init__(self, cache: Cache, hooks: Sequence[HookGuard]) -> None:
        self.cache = cache
        self.tree = cache.tree
        self._paged = [component for component in cache.tree.components if not component.is_state]
        self.follows = True
        self.published = PublishedData(cache, hooks)
        self._hooks = hooks
        self._seen: dict[int, _Seen] = {}
        self._due: dict[int, tuple[Request, int, int]] = {}
        self._turn = 0

    # -- slots a request reads

    def tables(self, request: Request) -> dict[int, Table]:
        """Per paged component, a slot for each allocated page; -1 for none."""
        path = _path(request)
        return {component.index: self._table(request, component, path) for component in self._paged}

    def _table(self, request: Request, component: TreeComponent, path: list[Node]) -> Table:
        """The slots of one component on the nodes of the path, and the request's own."""
        segment = request.receipt.segments[component.index]
        size = component.slots_per_page
        table = np.full(request.allocated * size, -1, np.int32)
        for node in path:
            slots = node.cells[component.index].device
            if slots is not None and any(
                low < node.end and node.start < high for low, high in segment
            ):
                held = np.frombuffer(slots, np.int32)
                table[node.start * size : node.end * size] = held
        # Published data of wider components may reach further than this one's private pages.
        for run in request.components[component.index].runs:
            table[run.first * size : run.end * size] = np.frombuffer(run.device, np.int32)
        return table

    def check_table(self, request: Request, name: str, said: Table) -> None:
        """The slots of a request's table are its own, page by page (T9)."""
        component = self.tree.by_name[name]
        held = self._table(request, component, _path(request))
        if len(said) == len(held) and not (said != held).any():
            return
        at = int((said != held).argmax()) if len(said) == len(held) else min(len(said), len(held))
        raise ContractViolation(
            "T9",
            name,
            f"the table of {_of(request)} has {len(said)} slots, {len(held)} are its own; they "
            f"differ at {at}",
        )

    def check_slots_stay(self, request: Request, was: dict[int, Table]) -> None:
        """A publication changed no slot of the pages that the request still needs (N1)."""
        page, size = request.computed // self.tree.page_size, self.tree.page_size
        now = self.tables(request)
        for component in self._paged:
            per_page, before = component.slots_per_page, was[component.index]
            after = now[component.index][: len(before)]
            ahead = np.zeros(len(before), np.bool_)
            ahead[page * per_page :] = True
            for low, high in needed(component, page, size):
                ahead[low * per_page : high * per_page] = True
            moved = (before != after) & (before >= 0) & (ahead | (after >= 0))
            if moved.any():
                at = int(moved.argmax())
                raise ContractViolation(
                    "N1",
                    component.name,
                    f"{_of(request)} published with its slots kept; that of page {at // per_page} "
                    f"was {before[at]} and is {after[at]}",
                )

    def remember(self, request: Request) -> None:
        """The request's slots are as they should be now."""
        self._note(request, self.tables(request))

    def _note(self, request: Request, tables: dict[int, Table]) -> None:
        if self.follows:
            self._seen[id(request)] = _Seen(request, tables)

    def moved(self, component: TreeComponent, source: bytes, target: bytes) -> None:
        """DEVICE slots of a component moved: every request that reads them follows (K7)."""
        index = component.index
        new_of = dict(zip(memoryview(source).cast("i"), memoryview(target).cast("i")))
        for seen in self._seen.values():
            if index not in seen.tables or seen.request.stage is CLOSED:
                continue
            was = [new_of.get(slot, slot) for slot in seen.tables[index].tolist()]
            seen.tables[index] = before = np.array(was, np.int32)
            after = self.tables(seen.request)[index][: len(before)]
            if len(after) < len(before) or np.any((before != after) & (before >= 0)):
                raise ContractViolation(
                    "K7",
                    component.name,
                    f"{_of(seen.request)} reads other slots than its data moved to",
                )

    def forget(self, request: Request) -> None:
        """It ended."""
        self._seen.pop(id(request), None)
        self._due.pop(id(request), None)

    def check_others(self, but: Request | None) -> None:
        """Data that other requests read stays unchanged (I4, T10, L5, M7)."""
        requests = [each for each in self.cache.requests.values() if each is not but]
        if not self.follows:
            return
        for _ in range(min(OTHERS_AT_A_TIME, len(requests))):
            self._turn = (self._turn + 1) % len(requests)
            request = requests[self._turn]
            seen, now = self._seen.get(id(request)), self.tables(request)
            if seen is not None and seen.request is request:
                self._compare(request, seen.tables, now)
            self._note(request, now)

    def _compare(
        self,
        request: Request,
        was: dict[int, Table],
        now: dict[int, Table],
        *,
        reach_only: bool = False,
    ) -> None:
        """Slots that were there are there still, or those that its reaches cover."""
        page = request.computed // self.tree.page_size
        for component in self._paged:
            before = was[component.index]
            after = now[component.index][: len(before)]
            if len(after) == len(before):
                changed = (before != after) & (before >= 0)
                if reach_only and changed.any():
                    kept = np.zeros(len(after) // component.slots_per_page, np.bool_)
                    kept[page:] = True
                    for low, high in needed(component, page, self.tree.page_size):
                        kept[low:high] = True
                    changed &= np.repeat(kept, component.slots_per_page)
                if not changed.any():
                    continue
                first = int(changed.argmax()) // component.slots_per_page
                n_slots = int(changed.sum())
            else:
                first, n_slots = len(after) // component.slots_per_page, len(before) - len(after)
            gone = len(after) < len(before) or after[first * component.slots_per_page] < 0
            raise ContractViolation(
                "I4" if not gone else "M7",
                component.name,
                f"{_of(request)} reads page {first} {'no longer' if gone else 'elsewhere'}; "
                f"{n_slots} slots changed",
            )

    def allocated(self, request: Request, *, left: bool) -> None:
        """Pages that had slots keep them, the others have new ones (A1, T9).

        Except pages behind the reaches that were handed over first (`left`).
        """
        seen, now = self._seen.get(id(request)), self.tables(request)
        if seen is not None and seen.request is request:
            self._compare(request, seen.tables, now, reach_only=left)
            for component in self._paged:
                stored = component.stored_between(0, request.allocated) * component.slots_per_page
                fresh = now[component.index][len(seen.tables[component.index]) : stored]
                if np.any(fresh < 0) or len(np.unique(fresh)) < len(fresh):
                    raise ContractViolation(
                        "T9",
                        component.name,
                        f"{_of(request)} is given {len(np.unique(fresh))} slots for "
                        f"{len(fresh) // component.slots_per_page} pages",
                    )
        self._note(request, now)

    def computed(self, request: Request, left: SequenceSlots | None) -> None:
        """The request gave up exactly the data behind its bounded reaches (L6, I3).

        `left` is its earlier data, if it passed the end of a page.
        """
        seen, now = self._seen.get(id(request)), self.tables(request)
        size = self.tree.page_size
        page = reached_from(self.cache, request)
        if seen is not None and seen.request is request:
            for component in self._paged:
                was, held = seen.tables[component.index], now[component.index]
                n_pages = len(held) // component.slots_per_page
                ahead = np.zeros(n_pages, np.bool_)
                ahead[page:] = True
                for low, high in needed(component, page, size):
                    ahead[low:high] = True
                wanted = np.repeat(ahead, component.slots_per_page)
                if len(was) != len(held) or np.any((was != held) & wanted & (was >= 0)):
                    raise ContractViolation(
                        "L6",
                        component.name,
                        f"{_of(request)} stands at page {page} and gave up pages that its reach "
                        f"{needed(component, page, size)} covers",
                    )
                if left is None or request.computed >= request.total:
                    continue  # an ending request hands it over later
                kept = sum(
                    int((~ahead[run.first : run.end]).sum())
                    for run in request.components[component.index].runs
                )
                collects = request.computed > request.prompt and kept * size < SMALL_TOKENS
                if kept and not collects:
                    raise ContractViolation(
                        "I3",
                        component.name,
                        f"{_of(request)} stands at page {page} and keeps {kept} pages of its own "
                        f"that its reach {needed(component, page, size)} does not cover",
                    )
        self._check_slid(request, request.computed // size, now)
        self._note(request, now)

    def _check_slid(self, request: Request, page: int, tables: dict[int, Table]) -> None:
        """Pages of the prefix that the reach needs are still pinned, or the request's own (L3)."""
        for component in self._paged:
            held = tables[component.index][:: component.slots_per_page]
            for low, high in needed(component, page, self.tree.page_size):
                lacking = np.flatnonzero(held[low : min(high, page)] < 0)
                if not len(lacking):
                    continue
                first = low + int(lacking[0])
                if self._left_earlier(request, component, page, first):
                    continue
                raise ContractViolation(
                    "L3",
                    component.name,
                    f"{_of(request)} stands at page {page}, needs pages [{low}, {high}) and holds "
                    f"none of page {first}; pinned are {request.receipt.segments[component.index]}",
                )

    def _left_earlier(
        self, request: Request, component: TreeComponent, page: int, first: int
    ) -> bool:
        """Whether it never held that page: a match pins only the pages that the anchor needs."""
        anchor = request.anchor_tokens // self.tree.page_size
        wanted = needed(component, anchor, self.tree.page_size)
        return anchor < page and not any(low <= first < high for low, high in wanted)

    # -- shared data

    def offer(self, request: Request, *, ending: bool) -> Offer:
        """The offer of a checkpoint or an end (I6, I7)."""
        self._check_namespace(request)
        page, rest = divmod(request.computed, self.tree.page_size)
        best = at_least = page
        left = self.published.see(request)
        states: dict[int, dict[int, bytes]] = {}
        tenant = request.root.tenant
        spare = [component.devices[tenant].headroom for component in self.tree.components]
        for component in self.tree.components:
            own = request.state_component(component.index)
            if own is None:
                continue
            if own.due and not ending and own.due_as in (Due.GRID, Due.LEFT):
                spare[component.index] -= 1
            mine = dict(own.captured)
            sure = max(own.shared, *mine) if mine else own.shared
            if ending and not rest and own.live is not None:
                mine[page] = own.live
                sure = page
            elif ending and own.tracked is not None:
                mine.setdefault(own.tracked_page, own.tracked)
                sure = max(own.shared, *mine)
            due_too = not ending and own.due_as is not DECODED
            states[component.index] = mine
            best = min(best, max(sure, own.due) if due_too else sure)
            at_least = min(at_least, sure)
        due = 0 if ending else left.due
        return Offer(
            request.cached,
            best,
            at_least,
            left,
            states,
            due,
            self._is_whole(left, states, best, due),
            self.cache.publisher.declined_checkpoints,
            request.published,
            spare,
            [_renewed(part.account) for part in request.components],
            self._n_failed(),
        )

    def _check_namespace(self, request: Request) -> None:
        """Shared data goes into its own namespace's tree (T11)."""
        node = request.receipt.anchor
        while node.parent is not None:
            node = node.parent
        if not is_root_of(self.tree, node, request.namespace):
            raise ContractViolation(
                "T11",
                None,
                f"{_of(request)} of namespace {request.namespace!r} is anchored in another's tree",
            )

    def _is_whole(
        self, left: SequenceSlots, states: dict[int, dict[int, bytes]], boundary: int, due: int
    ) -> bool:
        """Whether the request or the tree has all data that the reaches need at a boundary."""
        for index, mine in states.items():
            if boundary not in mine and boundary not in left.shared[index] and boundary != due:
                return False
        for component in self._paged:
            there = (left.own[component.index][:, 0] >= 0) | (left.tree[component.index][:, 0] >= 0)
            for low, high in needed(component, boundary, self.tree.page_size):
                if not there[low:high].all():
                    return False
        return True

    def check_ended(self, request: Request, offer: Offer, said: int, *, evicted: bool) -> None:
        """An end says up to which page the next request can resume, and shares all it can (I6).

        A state that was shared earlier may have been evicted since.
        """
        end = max(offer.cached, offer.best)
        there = end
        if self.tree.has_state:
            there = deepest(self.tree, look(self.tree, request.key, end), end, device_only=False)
        if said != there:
            raise ContractViolation(
                "I6",
                None,
                f"{_of(request)} is cached up to page {said}; all components can up to {there}",
            )
        if request.has_same_key():  # a cut one leads elsewhere, and its request had all shared
            self.check_shared(request, offer, end, evicted=evicted)

    def check_shared(self, request: Request, offer: Offer, end: int, *, evicted: bool) -> None:
        """Shared data is in the tree, in the slots it was computed in (I1, I2, I6, I7).

        Args:
            request: the request.
            offer: the data it had to share.
            end: the boundary shared up to, in pages.
            evicted: whether room was made on DEVICE meanwhile, which may have taken the tree's
                data.
        """
        if end not in (max(offer.cached, offer.best), max(offer.cached, offer.at_least)):
            raise ContractViolation(
                "I6",
                None,
                f"{_of(request)} is cached up to page {end}; all components can up to {offer.best}",
            )
        if end < offer.cached or not end:
            return
        shelf = look(self.tree, request.key, end)
        if offer.whole and end == offer.best and not evicted:
            there = deepest(self.tree, shelf, end, device_only=True)
            if there != end:
                raise ContractViolation(
                    "I7" if self.tree.has_state else "I6",
                    None,
                    f"{_of(request)} is cached up to page {end}, where only {there} pages can be "
                    "resumed from",
                )
        for index, mine in offer.states.items():
            self._check_donated(request, index, shelf, mine, end)
            if not evicted and not offer.due:
                self._check_strays(request, index, shelf, offer, end)
        self.published.check(request, offer.left, end, evicted=evicted)
        if not evicted:
            self._check_marked(request, shelf, offer.left, end)
        self.check_captured(request, offer.left, shelf.nodes)
        if (offer.published or offer.anything) and offer.n_failed == self._n_failed():
            self._check_backed_up(request, shelf, offer)

    def _n_failed(self) -> int:
        """Transfers that could not be submitted: their data stays without a backup."""
        return sum(hook.n_failed for hook in self._hooks)

    def _check_marked(self, request: Request, shelf: Shelf, was: SequenceSlots, end: int) -> None:
        """The tree knows the points of the pages that are in it only now (I10).

        Where the base needs every page: what was evicted since a point was made has none.
        """
        if not self.published.matters or not self.tree.components[0].is_prefix_closed:
            return
        new = was.tree[0][:end, 0] < 0
        known = {page for node in shelf.nodes for page, _ in node.each_point()}
        lacking = [page for page in request.points if 0 < page <= len(new) and new[page - 1]]
        lacking = sorted({*lacking} - known)
        if lacking:
            raise ContractViolation(
                "I10",
                None,
                f"{_of(request)} shares its pages up to {end} with points at "
                f"{sorted(request.points)}, and the tree knows of none at {lacking}",
            )

    def check_captured(self, request: Request, left: SequenceSlots, nodes: list[Node]) -> None:
        """A due state that is now the tree's still equals the live one (I7)."""
        for node in nodes if left.due else ():
            if node.end != left.due:
                continue
            for index in range(len(request.components)):
                own = request.state_component(index)
                shared = node.cells[index].device
                if own is None or own.live is None or shared is None:
                    continue
                if node.end in left.shared[index]:
                    continue
                pool = self.cache.mounted[index].component.device
                what = f"the data {_of(request)} shares at page {node.end} is"
                self._check_copy("I7", self.tree.components[index], pool, own.live, shared, what)

    def _check_backed_up(self, request: Request, shelf: Shelf, offer: Offer) -> None:
        """Under write-through new data is on its way to HOST, if there is room (B6, B7)."""
        if (
            self.cache.config.write_policy is not WritePolicy.WRITE_THROUGH
            or not self.cache.backups.enabled
        ):
            return
        above_is_backed = True
        for node in shelf.nodes:
            lacking = [
                component
                for component, cell in zip(self.tree.components, node.cells)
                if component.host is not None
                and cell.device is not None
                and not is_left_behind(cell.stamp)
                and cell.host is None
                and cell.incoming is None
            ]
            gained = bool(lacking) and self._gained(request, node, lacking, offer)
            if lacking and not gained:
                return  # others back it up, and data below waits for that
            if gained and above_is_backed:
                room = all(
                    ledger is not None and ledger.spare >= component.n_slots(node)
                    for component in lacking
                    for ledger in [component.hosts[node.tenant]]
                )
                backed = any(cell.host is not None or cell.incoming for cell in node.cells)
                # Backups pin their source, one node after the other.
                spare = all(
                    offer.spare[each.index]
                    >= self._had(each, shelf, offer) + offer.renewed[each.index]
                    for each in self.tree.components
                    if not each.is_prefix_closed
                )
                if room and spare:
                    raise ContractViolation(
                        "B7" if backed else "B6",
                        lacking[0].name,
                        f"{node!r} gained data that is not backed up; HOST has "
                        f"{[each.host.free for each in lacking if each.host is not None]} free "
                        f"slots, {[component.n_slots(node) for component in lacking]} are needed",
                    )
                return
            base = node.cells[0]
            above_is_backed = base.host is not None or base.incoming is not None

    def _had(self, component: TreeComponent, shelf: Shelf, offer: Offer) -> int:
        """Slots of a component that were the tree's before, and pinned by nobody perhaps."""
        if component.is_state:
            return len(offer.left.shared[component.index])
        held = offer.left.tree[component.index][: shelf.n_pages]
        return int((held >= 0).sum())

    def _gained(
        self, request: Request, node: Node, lacking: list[TreeComponent], offer: Offer
    ) -> bool:
        """Whether the request brought the node, or one of the components to it since an offer."""
        brought = node.start * self.tree.page_size >= request.anchor_tokens
        if brought and not lacking[0].is_state:
            # Room for others may have been made of a copy that was there.
            return not offer.left.copied[lacking[0].index][node.start : node.end].any()
        for component in lacking:
            if not component.is_state:
                had = offer.left.tree[component.index][node.start : node.end, 0]
                if len(had) == node.end - node.start and (had < 0).all():
                    return True
        return False

    def _check_donated(
        self, request: Request, index: int, shelf: Shelf, mine: dict[int, bytes], end: int
    ) -> None:
        """Every state on the pages that were inserted is the tree's (I7)."""
        component = self.tree.components[index]
        for node in shelf.nodes:
            hangs = all(node.cells[each].device is not None for each in component.depends_on)
            inside = [page for page in mine if node.start < page <= min(node.end, end)]
            if hangs and (inside and (inside != [node.end] or not node.cells[index].device)):
                raise ContractViolation(
                    "I7",
                    component.name,
                    f"{_of(request)} had states at pages {inside} and is cached up to {end} with "
                    f"{node!r} without",
                )

    def _check_strays(
        self, request: Request, index: int, shelf: Shelf, offer: Offer, end: int
    ) -> None:
        """The tree has no states of the sequence but those that it had and was given (I7)."""
        component, had = self.tree.components[index], offer.left.shared[index]
        for node in shelf.nodes:
            slots = node.cells[index].device
            if slots is None or node.end > end or node.end in had:
                continue
            if offer.states[index].get(node.end) != slots:
                raise ContractViolation(
                    "I7",
                    component.name,
                    f"{_of(request)} stands at {request.computed} tokens and leaves a state at "
                    f"page {node.end}; it had some at {sorted(offer.states[index])}",
                )

    # -- states

    def states(self, request: Request) -> dict[int, States]:
        """Its states by component, before an operation."""
        found = {}
        for component in self.tree.components:
            own = request.state_component(component.index)
            if own is not None:
                found[component.index] = States(
                    own.live,
                    frozenset(own.captured),
                    own.tracked_page,
                    own.due,
                    own.due_as,
                    own.account.promised,
                )
        return found

    def check_kept(
        self, request: Request, was: dict[int, States], shared: Collection[int], spare: Spare
    ) -> None:
        """States that were set up or kept are copies of the right states (M8, I7).

        Args:
            request: whose.
            was: their bytes before.
            shared: boundaries at which the tree has its states now.
            spare: what every state pool had to spare.
        """
        for index, before in was.items():
            own = request.state_component(index)
            if own is None or own.live is None:
                continue
            component = self.tree.components[index]
            pool = self.cache.mounted[index].component.device
            anchor = request.receipt.anchor
            source = anchor.cells[index].device
            if before.live is None and anchor.parent is not None and source is not None:
                self._check_copy(
                    "M8", component, pool, source, own.live, f"{_of(request)} begins with"
                )
            for page, slot in own.captured.items():
                if page not in before.captured:
                    self._check_copy(
                        "I7",
                        component,
                        pool,
                        own.live,
                        slot,
                        f"the state captured at page {page} is",
                    )
            if own.tracked is not None and own.tracked_page != before.tracked_page:
                if own.tracked_page != before.due:
                    raise ContractViolation(
                        "I7",
                        component.name,
                        f"{_of(request)} keeps the state due at page {before.due} as that of page "
                        f"{own.tracked_page}",
                    )
                self._check_copy(
                    "I7",
                    component,
                    pool,
                    own.live,
                    own.tracked,
                    f"the state kept at page {own.tracked_page} is",
                )
            due = before.due if before.live is not None else 0
            kept = own.due == due or due in own.captured or due in shared
            wanted = before.due_as in (Due.POINT, Due.GRID) and spare.slot
            wanted = wanted or (before.due_as is Due.LEFT and spare.free_slot)
            if due and not kept and (before.must_be_kept or wanted):
                raise ContractViolation(
                    "I7",
                    component.name,
                    f"the state due at page {due} of {_of(request)} is not kept with "
                    f"{before.promised} slots promised and {component.device.headroom} to spare",
                )

    def check_copy(self, component: TreeComponent, source: bytes, copy: bytes, what: str) -> None:
        """A kept state is a copy of another (I7)."""
        pool = self.cache.mounted[component.index].component.device
        self._check_copy("I7", component, pool, source, copy, what)

    def _check_copy(
        self,
        rule: str,
        component: TreeComponent,
        pool: DevicePool,
        source: bytes,
        copy: bytes,
        what: str,
    ) -> None:
        if not self.cache.config.payload:
            return
        read, into = (state_number(slot) for slot in (source, copy))
        for spec, lanes in zip(pool.specs, pool.lanes):
            if not bool((lanes[read] == lanes[into]).all()):
                raise ContractViolation(
                    rule,
                    component.name,
                    f"{what} slot {into}, which is no copy of slot {read}: plane {spec.name!r} of "
                    f"layer {spec.layer} differs",
                )

    def due(self, request: Request) -> list[tuple[int, Due]]:
        """The boundaries at which the request's states are due, and why, by state component."""
        return [(own.due, own.due_as) for own in request.state_components]

    def check_due(
        self, request: Request, ahead: list[int], stood: list[tuple[int, Due]] | None
    ) -> None:
        """States are due where a point, the grid or the decode needs them, and only there (I7).

        The same holds for all components (I10, I12). `ahead` are the points before the step;
        `stood` are the states due before a step of no tokens, which changes nothing.
        """
        if stood is not None:
            for part, was, now in zip(request.state_components, stood, self.due(request)):
                if was != now:
                    raise ContractViolation(
                        "I7",
                        part.component.name,
                        f"{_of(request)} computed 0 tokens, and its state is due at page {now[0]} "
                        f"instead of {was[0]}",
                    )
            return
        page, rest = divmod(request.computed, self.tree.page_size)
        interval = decode_pages(self.cache)
        for component in self.tree.components:
            own = request.state_component(component.index)
            if own is None:
                continue
            due = own.due_as if own.due else None
            wanted: Due | None = None
            allowed: tuple[Due | None, ...] = ()
            if not rest and page in ahead:
                wanted = Due.POINT
            elif not rest and page and request.computed < request.prompt:
                allowed = self._due_on_grid(request, page)
                wanted = allowed[0]
            elif not rest and request.total > request.prompt and not page % interval:
                wanted = Due.DECODED
            if due not in (wanted, *allowed) or own.due not in (0, page):
                raise ContractViolation(
                    "I7" if not allowed else "I12" if due is not None else "I10",
                    component.name,
                    f"{_of(request)} stands at {request.computed} tokens, where the state of page "
                    f"{own.due} is due as {due}; wanted is {wanted}; its points are "
                    f"{sorted(request.points)}, states are left at {sorted(request.left)}",
                )
        if self.tree.has_state and not rest and page:
            self._note_due(request, page)

    def _due_on_grid(self, request: Request, page: int) -> tuple[Due | None, ...]:
        """Whether the end of a chunk is worth a state; several answers where a slot was lacking."""
        published = self.published
        anchor = request.anchor_tokens // self.tree.page_size
        at = max([anchor, *(each for each in request.points if each < page)])
        before = max([at, *(each for each in request.left if each < page)])
        wanted_at, wanted_before = self._due.get(id(request), (request, anchor, anchor))[1:]
        may = published.affords(page - at, states_only=False)
        must = published.affords(page - max(at, wanted_at), states_only=False)
        if must:
            return (Due.GRID,)
        may_leave = published.affords(page - before, states_only=True)
        if published.affords(page - max(before, wanted_before), states_only=True) and not may:
            return (Due.LEFT,)
        found: list[Due | None] = [None]
        if may:
            found.append(Due.GRID)
        if may_leave:
            found.append(Due.LEFT)
        return tuple(found)

    def _note_due(self, request: Request, page: int) -> None:
        """Remember where states were due last, as a point and at all."""
        anchor = request.anchor_tokens // self.tree.page_size
        _, point, last = self._due.get(id(request), (request, anchor, anchor))
        due = {own.due_as for own in request.state_components if own.due == page}
        if due & {Due.POINT, Due.GRID}:
            point = last = page
        elif Due.LEFT in due:
            last = page
        self._due[id(request)] = (request, point, last)


def _path(request: Request) -> list[Node]:
    """The nodes of its anchor's path, root first."""
    path: list[Node] = []
    node = request.receipt.anchor
    while node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def _renewed(account: Account) -> int:
    """How far a promise rises when nothing is held any more (A1)."""
    promised = account.promised - account.load
    return max(0, min(account.peak, account.remaining) - promised)


def _of(request: Request) -> str:
    return f"the request of {request.prompt} tokens"


assert np.dtype(np.int32).itemsize == SLOT_BYTES
