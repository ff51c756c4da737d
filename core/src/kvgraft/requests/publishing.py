"""Publishes a request's pages in the tree: offered, shared, pinned and backed up, or left behind.

Contract: I1 to I12.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvgraft.compiled import mypyc_attr
from kvgraft.errors import LeaseError
from kvgraft.requests.backup import Backups
from kvgraft.requests.components import RequestComponent, RequestState, divided
from kvgraft.requests.leases import Leases, Locks
from kvgraft.requests.request import Request
from kvgraft.requests.resume_points import END, GRID
from kvgraft.requests.slots import PageSlots, StateSlots, needed_between
from kvgraft.transfers import Fence, Journal
from kvgraft.tree import inserting, matching, pinning
from kvgraft.tree.inserting import NO_STATES, Holding, Run
from kvgraft.tree.keys import TOKEN_BYTES, common_prefix_pages
from kvgraft.tree.node import Node
from kvgraft.tree.pinning import NO_PAGE
from kvgraft.tree.tree import Tree
from kvgraft.types import Span, new_span


class Retained(NamedTuple):
    """Pages that a running request retains as its own while it publishes others.

    Attributes:
        pages: per component, in order; of bounded reaches those with slots.
        renews: whether bounded reaches are promised as many slots again as they publish.
    """

    pages: list[tuple[Span, ...]]
    renews: bool


@mypyc_attr(allow_interpreted_subclasses=True)
class Offers:
    """Takes data to share out of a request's own slots, for the tree's insert."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def take_out(self, request: Request, end: int, retained: Retained | None) -> list[Holding]:
        """The request's offer to the tree up to boundary `end`; the rest stays private.

        Args:
            request: whose pages and states.
            end: a boundary in pages.
            retained: the pages it keeps to go on; None if it shares all of them.
        """
        holdings: list[Holding] = []
        for part in request.components:
            component = part.component
            if isinstance(part, RequestState):
                holdings.append(self._states_out(request, part, end))
                continue
            private = [new_span((end, NO_PAGE))]
            if retained is not None:
                private = sorted([*retained.pages[component.index], *private])
            below = part.take_out(private)
            if below and not component.is_prefix_closed:
                below = self._classed(request, part, below)
            renews = retained is not None and retained.renews and not component.is_prefix_closed
            holdings.append(Holding(below, NO_STATES, renews=renews))
        return holdings

    def _states_out(self, request: Request, part: RequestState, end: int) -> Holding:
        """The captured states that the request offers up to boundary `end`; the rest stays."""
        offered = part.captured
        part.captured = {}
        # If a page of a bounded base is still private, so is the state at its end (T4).
        base = () if self.tree.prefix_closed else request.components[0].runs
        if offered and (base or max(offered) > end):
            part.captured = {
                page: slot
                for page, slot in offered.items()
                if page > end or any(run.first < page <= run.end for run in base)
            }
            offered = {p: s for p, s in offered.items() if p not in part.captured}
        if offered:
            part.shared = max(part.shared, *offered)
            part.account.release(len(offered))
        return Holding([], offered, request.left)

    def _classed(self, request: Request, part: RequestComponent, runs: list[Run]) -> list[Run]:
        """Pages that leave the request: for resume points, or left behind (I9, I10).

        With states, only pages before a state are useful; the others are freed.
        """
        component = part.component
        first, end = runs[0].first, runs[-1].end
        window = component.window_pages
        if window is not None and end - window <= first and end in request.points:
            return runs
        worth = needed_between(component, request.points, first, end)
        if len(worth) == 1 and worth[0].start <= first and worth[0].end >= end:
            return runs
        kept, behind = divided(runs, worth)
        if self.tree.has_state:
            behind, useless = divided(behind, needed_between(component, request.left, first, end))
            if useless:
                part.free_pages(useless)
        left = [run.cut(run.first, run.end, is_left=True) for run in behind]
        return sorted([*kept, *left], key=inserting.first_page)


def _kept(request: Request, beside: list[tuple[Node, int]]) -> Retained:
    """The pages of its own of which the tree has others' data; they stay as they are (N1)."""
    pages: list[tuple[Span, ...]] = []
    for part in request.components:
        index = part.component.index
        there = [
            Span(node.start, node.start + n_pages)
            for node, n_pages in beside
            if node.cells[index].device is not None
        ]
        own = tuple([Span(run.first, run.end) for run in part.runs])
        pages.append(pinning.common_pages(tuple(there), own))
    return Retained(pages, renews=False)


BEHIND_TOKENS: Final = 64
"""From this many evict-first tokens on, a decode inserts them into the tree."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Publisher:
    """Moves a request's private data into the tree, as it runs and when it ends.

    Attributes:
        checkpoints: how often requests shared their data and went on.
        declined_checkpoints: how often they could not, without headroom (A12).
        tokens: tokens computed, prompts' and decoded ones.
    """

    def __init__(
        self,
        tree: Tree,
        pages: PageSlots,
        states: StateSlots,
        offers: Offers,
        leases: Leases,
        backups: Backups,
        journal: Journal,
    ) -> None:
        self.tree = tree
        self.pages = pages
        self.states = states
        self.offers = offers
        self.leases = leases
        self.backups = backups
        self.journal = journal
        self.points = states.points
        self.checkpoints = 0
        self.declined_checkpoints = 0
        self.tokens = 0

    def computed(self, request: Request, n_tokens: object, fence: Fence | None) -> None:
        """The next tokens exist: note states, and hand over pages behind the reaches (L6, I9)."""
        size = self.tree.page_size
        end = request.position_after(n_tokens, size)
        start, request.computed = request.computed, end
        self.tokens += end - start
        page, rest = divmod(end, size)
        if fence is not None:
            self.journal.set_fence(fence)
        if end == start:
            return
        if self.tree.has_state:
            self.states.note_boundary(request, 0 if rest else page)
        if self.points.matter and page > start // size:
            reached = self.points.reached_from(request, page)
            pinning.slide(self.tree, request.receipt, reached)
            if request.bounded_components:
                n_splits, passed = self.tree.n_splits, range(page, page + (end != request.total))
                if start >= request.prompt:
                    # Page by page, with the promise that it would have without drafts (G3).
                    passed = range(start // size + 1, page + (page * size != request.total))
                for at in passed:
                    ahead = at + 1 + request.draft_pages - request.allocated
                    self.leave_behind(request, self.points.reached_from(request, at), ahead)
                if self.tree.n_splits != n_splits:  # part of a node may be behind the reach now
                    pinning.slide(self.tree, request.receipt, reached)

    def checkpoint(self, request: Request, *, keep_slots: bool = False) -> bool:
        """Share the request's data, and go on; False where that changes nothing (I5, I6, N1)."""
        key = request.key
        if key.edits != request.key_edits or len(key.data) < request.computed * TOKEN_BYTES:
            self.ending_page(request)  # a key that is refused leaves due states as they are
        page = request.computed // self.tree.page_size
        if request.state_components:
            page = self.states.keep_due_states(request, page)
        if not self._has_new(request, page, keep_slots=keep_slots):
            return False
        beside = self._beside(request, page) if keep_slots else []
        for part in request.components:
            if part.component.is_state:
                continue
            if beside is None or not part.can_replenish(page, beside):
                self.declined_checkpoints += 1  # the shared pages could not be replaced (A12)
                return False
        boundary = max(page, request.receipt.anchor.end)
        locks = self.leases.lock(boundary) if self.leases.lockers else None
        self.share(request, page, locks, _kept(request, beside) if beside else None)
        request.cached = max(request.cached, page)
        self.checkpoints += 1
        return True

    def ending_page(self, request: Request) -> int:
        """The deepest boundary up to which an ending request leaves data; changes nothing (I8).

        Raises:
            LeaseError: its key was cut, or lacks tokens: others' data would be under it.
        """
        page, key = request.computed // self.tree.page_size, request.key
        for part in request.state_components:
            page = min(page, self.states.offered_page(request, part))
        if self._has_new(request, page) or (request.published and self.backups.enabled):
            if key.edits != request.key_edits:
                raise LeaseError(
                    f"request computed {request.computed} tokens and its key was cut before that, "
                    f"and holds {key.n_tokens} now; cut keys of requests that ended"
                )
            if page * self.tree.page_bytes > len(key.data):
                raise LeaseError(
                    f"request computed {request.computed} tokens and its key holds {key.n_tokens}; "
                    "extend the key with the tokens that were decoded, then call this again"
                )
        return page

    def finish(self, request: Request, page: int) -> int:
        """Leave the data up to `ending_page` to the tree; return the pages cached (I6, I7)."""
        backs_up, has_state = self.backups.enabled, bool(request.state_components)
        if self._has_new(request, page) or (request.published and backs_up):
            has_state = has_state and page * self.tree.page_size != request.computed
            locks = self.leases.lock(max(page, request.receipt.anchor.end)) if backs_up else None
            for part in request.state_components:
                self.states.offer_states(request, part)
            if backs_up:
                for each in request.components:
                    each.close_accounts()  # promises must not stand in the way of its backups
                self.share(request, page, locks)
            else:
                self.insert(request, page)
        page = max(page, request.cached)
        if has_state:  # other states than its last one may have been evicted
            page = matching.match(self.tree, request.key, page).anchor
        return page

    def leave_behind(self, request: Request, page: int, ahead: int) -> None:
        """Hand the tree the pages that bounded reaches at boundary `page` no longer cover (I9).

        They cost no promise there, and are the first victims for new tokens. A decode with small
        pages collects some before, as long as `ahead` more pages are promised; if that is too
        little, pages that no resume point needs are freed.
        """
        end = self.pages.left_behind(request, page)
        if not end:
            return
        if request.computed > request.prompt and self.tree.page_size < BEHIND_TOKENS:
            collected = self.pages.pages_behind(request, page)
            if collected * self.tree.page_size < BEHIND_TOKENS:
                if self.pages.has_promise_left(request.bounded_components, ahead):
                    return
                if not self.pages.is_worth_keeping(request, page):
                    self.pages.give_back_behind(request, page)
                    return
        named = min(end, self._shareable(request))
        if named:
            self.publish(request, named, page)
        if named < end:
            self.pages.give_back_behind(request, page)

    def publish_states(self, request: Request) -> None:
        """Hand the tree the states captured so far, with the pages before them."""
        captured = [page for part in request.state_components for page in part.captured]
        end = max([page for page in captured if page <= self._shareable(request)], default=0)
        if end and self.tree.prefix_closed:
            page = self.points.reached_from(request, request.computed // self.tree.page_size)
            self.publish(request, end, page)

    def publish(self, request: Request, end: int, position: int) -> None:
        """Hand the tree the pages that a request at page `position` no longer needs.

        Prefix-closed data comes along up to boundary `end` and stays pinned (T4); so no promise
        changes (I12). Pages that another request has inserted meanwhile stay the request's own as
        well, so that its tables do not change; if the tree's cannot be pinned beside them (A12),
        left-behind pages are freed instead.
        """
        #   0 ────── anchor ────────── there ────────────── end          position
        #   pinned     │ others' nodes   │ the request's pages │  what reaches at position
        #              │ pinned beside   │ go to the tree, and │  need stays private
        #              │ its own copies  │ are pinned there    │
        # Prefix-closed slots: private -> pinned. Its promises stay as they were (I12).
        others = self._others(request, end)
        parts = [part for part in request.components if part.component.is_prefix_closed]
        if others is None or not all(part.can_pin(others, end) for part in parts):
            self.pages.give_back_behind(request, position)
            return
        held = request.receipt.anchor
        boundary = held.end
        there = boundary + sum([n_pages for _, n_pages in others])
        pages = [
            (Span(0, there),)
            if component.is_prefix_closed
            else component.reach_pages.spans(position)
            for component in self.tree.components
        ]
        inserted = self._insert(request, end, Retained(pages, renews=True), held)
        if inserted.anchor.end > boundary:
            pinning.advance(self.tree, request.receipt, inserted.anchor, boundary)
            request.key.found_at(inserted.anchor, request.root)
        self._queue(inserted)
        request.published = True

    def _others(self, request: Request, end: int) -> list[tuple[Node, int]] | None:
        """Others' nodes with data behind the request's anchor, and how many pages of each agree.

        None if it would have to give up its own canonical copy beside one of them.
        """
        tree = self.tree
        node = request.receipt.anchor
        page = node.end
        passed: list[tuple[Node, int]] = []
        data, page_bytes = request.key.data, tree.page_bytes
        while page < end and node.children is not None:
            offset = page * page_bytes
            child = node.child(bytes(data[offset : offset + page_bytes]))
            if child is None:
                break
            cells = [(component, child.cells[component.index]) for component in tree.prefix_closed]
            if any(cell.device is None for _, cell in cells):
                if any(
                    component.home_is_host and cell.host is not None for component, cell in cells
                ):
                    return None
                break
            agreed = common_prefix_pages(data, offset, child.key, page_bytes)
            n_pages = min(agreed, end - page, child.end - child.start)
            passed.append((child, n_pages))
            page += n_pages
            if page < child.end:
                break
            node = child
        return passed

    def _beside(self, request: Request, end: int) -> list[tuple[Node, int]] | None:
        """`_others`, and nodes above them on which the request may have slots of its own."""
        others = self._others(request, end)
        if others is None:
            return None
        first = min([part.runs[0].first for part in request.components if part.runs], default=end)
        above = request.receipt.anchor
        while above.end > first and above.parent is not None:
            others.insert(0, (above, above.end - above.start))
            above = above.parent
        return others

    def insert(self, request: Request, page: int) -> inserting.Inserted:
        """Offer private data up to boundary `page`; duplicates of tree data are freed (I1)."""
        inserted = self._offer(request, page, None)
        self._queue(inserted)
        if not inserted.nodes:
            self.tree.prune(inserted.anchor)  # evict-first pages may have had no place (T3)
        return inserted

    def _offer(self, request: Request, page: int, retained: Retained | None) -> inserting.Inserted:
        """`insert`, with no candidates entered so far, and without the pages `retained`."""
        key = request.key
        if self.points.matter and page:
            request.points.setdefault(page, END)
        inserted = self._insert(request, page, retained)
        request.last_point = max(request.last_point, page)
        key.found_at(inserted.anchor, request.root)
        return inserted

    def share(
        self, request: Request, page: int, locks: Locks | None, retained: Retained | None = None
    ) -> None:
        """Insert up to boundary `page`, pin it there before the old pins go (I5), back it up.

        A deeper anchor stays: the data published there is the request's own. `locks` names the
        pages that components want pinned.
        """
        inserted = self._offer(request, page, retained)
        held = request.receipt
        anchor = inserted.anchor if page >= held.anchor.end else held.anchor
        try:
            self._repin(request, anchor, page, locks)
        finally:
            self._queue(inserted)
        try:
            if self.backups.at_insert:
                since = request.anchor_tokens // self.tree.page_size
                self.backups.inserted(inserted.anchor, inserted.nodes, since)
            request.published = False
        finally:
            pinning.release(self.tree, held)

    # -- inside

    def _queue(self, inserted: inserting.Inserted) -> None:
        """Enter inserted data without pins as candidates."""
        for node in inserted.nodes:
            self.tree.queue_candidates(node)

    def _repin(self, request: Request, anchor: Node, shared: int, locks: Locks | None) -> None:
        """New pins at `anchor`; the caller releases the old receipt afterwards (I5).

        Of bounded reaches up to page `shared`: behind it the request has its own. Data it left
        behind is not pinned: it is evictable already, so others' promises may count on it (A12). So
        may be a state, of which it has a live one, and extra pages that a component asks to pin:
        where they are promised, they stay unpinned.
        """
        #   0 ────────── shared ────────── position       the reach at position, a window of w pages
        #        [position - w .................)
        #        [ pinned    )[ the request's own )
        tree = self.tree
        position = request.computed // tree.page_size
        ahead: list[tuple[Span, ...] | None] = [None] * len(tree.components)
        if position > shared:
            for component in tree.components:
                if not component.is_prefix_closed:
                    segment = pinning.segment_ahead(component, anchor.end, position)
                    ahead[component.index] = pinning.common_pages(segment, (Span(0, shared),))
        host_from = 0 if tree.homes_on_host else None
        receipt = None
        if locks is not None:
            asked = locks.within(tree, ahead)
            receipt = pinning.acquire(
                tree, anchor, host_from=host_from, segments=asked, locks=locks.undo
            )
        if receipt is None:
            receipt = pinning.acquire(tree, anchor, host_from=host_from, segments=ahead)
        if receipt is None:
            for component in tree.components:
                if component.is_state:
                    ahead[component.index] = ()
            receipt = pinning.acquire(
                tree, anchor, host_from=host_from, segments=ahead, enforce=False
            )
        assert receipt is not None
        request.receipt = receipt

    def _has_new(self, request: Request, page: int, *, keep_slots: bool = False) -> bool:
        """Whether the tree lacks something that the request has up to boundary `page`."""
        if page > request.receipt.anchor.end:
            return True
        for part in () if keep_slots else request.components:
            if part.holds_pages and part.first_page < page:
                return True
        return page > request.cached and any(own.shared < page for own in request.state_components)

    def _insert(
        self, request: Request, end: int, retained: Retained | None, leaf: Node | None = None
    ) -> inserting.Inserted:
        #   start ─────► ... anchor ─────► end       start: the anchor, or above it where pages or
        #   └─ the offer begins here at the first    states of the offer come before its boundary
        if self.points.matter and not self.tree.has_state:
            # Also points behind `end`: a part of their data may be inserted now.
            passed = max(end, request.computed // self.tree.page_size)
            for page in self.points.grid_between(request, request.last_point, passed):
                request.points.setdefault(page, GRID)
            request.last_point = max(request.last_point, passed)
        holdings = self.offers.take_out(request, end, retained)
        start = request.receipt.anchor
        if start.end * self.tree.page_size != request.anchor_tokens:
            # The anchor is deeper than at the match: a part of the offer may be above it.
            first = end
            for each in holdings:
                if each.runs:
                    first = min(first, each.runs[0].first)
                if each.states:
                    first = min(first, min(each.states) - 1)
            while start.end > first:
                assert start.parent is not None
                start = start.parent
        inserted = inserting.insert(
            self.tree,
            start,
            request.key,
            end,
            holdings,
            request.points,
            leaf,
        )
        for kind in inserted.points:
            self.points.made[kind] += 1
        for part in request.state_components:
            for slots in holdings[part.component.index].states.values():
                part.account.ledger.give_private(slots)
        return inserted

    def _shareable(self, request: Request) -> int:
        """Pages of it that may be shared: its key names their tokens, and it was not cleared."""
        if not request.has_same_key() or self.tree.is_cleared(request.root):
            return 0
        return request.key.n_tokens // self.tree.page_size
