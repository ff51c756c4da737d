"""The slots a running request owns: its pages, and its live, captured and last decoded states."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvgraft.compiled import mypyc_attr
from kvgraft.packages.dispatch import Mounted
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.components import DECODED, POINT, Due, RequestComponent, RequestState, divided
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import Request
from kvgraft.requests.resume_points import GRID, ResumePoints
from kvgraft.tree import eviction
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.inserting import Run
from kvgraft.tree.ledger import HOST, Ledger
from kvgraft.tree.pinning import NO_PAGE
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

PASSED = "the engine computed past it"
"""Why a point is skipped if the model has overwritten its state."""


def needed_between(
    component: TreeComponent, boundaries: Collection[int], first: int, end: int
) -> list[Span]:
    """Pages between `first` and `end` that a component needs at any of `boundaries`.

    In order and disjoint.
    """
    #   [b1 - w ─── b1)    [b2 - w ─── b2)          a window w at boundaries b1 < b2 < b3:
    #                             [b3 - w ─── b3)   spans that touch are one
    merged: list[Span] = []
    window = component.window_pages
    if window is not None:
        # The usual case of the general rule below, without intermediate spans.
        low = high = -1
        for boundary in sorted(boundaries):
            start = boundary - window if boundary > window else 0
            if boundary <= first or start >= end:
                continue
            if start > high >= 0:
                merged.append(Span(low, high))
            if start > high or high < 0:
                low = start
            high = boundary
        if high >= 0:
            merged.append(Span(low, high))
        return merged
    named = [
        span
        for boundary in boundaries
        if boundary > first
        for span in component.reach_pages.spans(boundary)
        if span.start < end and span.end > first
    ]
    for span in sorted(named) if len(named) > 1 else named:
        if merged and span.start <= merged[-1].end:
            last = merged[-1]
            merged[-1] = Span(last.start, max(last.end, span.end))
        else:
            merged.append(span)
    return merged


def took_pages(
    requests: list[Request], index: int, firsts: list[int], ends: list[int], slots: bytes
) -> None:
    """Promised slots of a component are the requests', in their order, of each pages [first, end).

    The ledger's books are the caller's.
    """
    start, page_bytes = 0, requests[0].components[index].component.slots_per_page * SLOT_BYTES
    for request, first, end in zip(requests, firsts, ends):
        part = request.components[index]
        stop = start + (end - first) * page_bytes
        part.account.took((stop - start) // SLOT_BYTES)
        part.add_pages(first, end, slots[start:stop])
        start = stop


@mypyc_attr(allow_interpreted_subclasses=True)
class PageSlots:
    """Moves slots of pages between pools and running requests."""

    def __init__(self, tree: Tree, evictor: Evictor) -> None:
        self.tree = tree
        self.evictor = evictor

    def allocate_pages(self, request: Request, pages: int) -> bool:
        """Slots for the next `pages` pages, of every paged component or of none."""
        first, end = request.allocated, request.allocated + pages
        needs: list[tuple[RequestComponent, int]] = []
        for part in request.components:
            component = part.component
            if component.is_state:
                continue
            n = component.stored_between(first, end) * component.slots_per_page
            beyond = n > part.account.promised or part.host_account is not None
            if beyond and any(short > ledger.headroom for ledger, short in part.unreserved(n)):
                return False
            if n:
                needs.append((part, n))
        for part, n in needs:
            if n > part.account.ledger.room:
                promised = part.account.promised
                self.evictor.ensure_promised(part.component, n, request.root.tenant, promised)
            if part.host_account is not None:
                self.evictor.ensure_free(part.component, HOST, n, request.root.tenant)
        for part, n in needs:
            part.take_pages(first, n)
        request.allocated = end
        return True

    def left_behind(self, request: Request, page: int) -> int:
        """The end of the pages that bounded reaches at boundary `page` no longer cover; else 0."""
        end = 0
        for part in request.bounded_components:
            component, runs = part.component, part.runs
            if not runs:
                continue
            if component.window_pages is not None:
                start = page - component.window_pages
                if runs[0].first < start:
                    end = max(end, start)
                continue
            behind = self._behind(part, page)
            if behind:
                end = max(end, behind[-1].end)
        return end

    def pages_behind(self, request: Request, page: int) -> int:
        """Pages of the component that holds most of the pages that `left_behind` names."""
        behind = [self._behind(part, page) for part in request.bounded_components]
        return max([sum([run.end - run.first for run in runs]) for runs in behind], default=0)

    def has_promise_left(self, parts: Sequence[RequestComponent], pages: int) -> bool:
        """Whether the next `pages` pages of every paged part are promised."""
        for part in parts:
            component = part.component
            if part.account.promised < pages * component.slots_per_page and not component.is_state:
                return False
        return True

    def unreserved(
        self, request: Request, pages: int, page: int
    ) -> list[tuple[Ledger, int]] | None:
        """The slots, by pool, that the next `pages` pages need beside the promised ones.

        None if they do not fit even after the pages behind boundary `page` are handed to the tree.
        """
        first, end = request.allocated, request.allocated + pages
        found: list[tuple[Ledger, int]] = []
        for part in request.components:
            component = part.component
            if component.is_state:
                continue
            n = component.stored_between(first, end)
            if not component.is_prefix_closed:
                n -= sum(run.end - run.first for run in self._behind(part, page))
            if n > 0:
                found += part.unreserved(n * component.slots_per_page)
        return found if all(n <= ledger.headroom for ledger, n in found) else None

    def is_worth_keeping(self, request: Request, page: int) -> bool:
        """Whether a resume point needs any page that `left_behind` names."""
        for part in request.bounded_components:
            for run in self._behind(part, page):
                if needed_between(
                    part.component, (*request.points, *request.left), run.first, run.end
                ):
                    return True
        return False

    def give_back_behind(self, request: Request, page: int) -> None:
        """Free private pages that bounded reaches at boundary `page` no longer cover (L6, I3)."""
        for part in request.bounded_components:
            if behind := part.take_out(_ahead(part, page)):
                part.free_pages(behind)

    def _behind(self, part: RequestComponent, page: int) -> list[Run]:
        """A request's pages that the reach at boundary `page` no longer covers."""
        return divided(part.runs, _ahead(part, page))[1]


@mypyc_attr(allow_interpreted_subclasses=True)
class StateSlots:
    """Moves slots of states between pools and running requests, and copies their data.

    Attributes:
        copies_on_write: states copied from the tree for a request that writes to them (M8).
    """

    def __init__(
        self, tree: Tree, mounted: Sequence[Mounted], evictor: Evictor, points: ResumePoints
    ) -> None:
        self.tree = tree
        self.evictor = evictor
        self.points = points
        self.mounted = mounted
        self.copies_on_write = 0

    def set_up_states(self, request: Request) -> None:
        """Give the request live states, copied from its anchor (M8); keep due states first."""
        if request.state_components[0].due:
            self.settle_due(request)
        for part in request.state_components:
            if part.live is not None:
                if part.due:
                    self.keep_due(request, part)
                continue
            part.live = self._take_state(request, part)
            assert part.live is not None
            anchor = request.receipt.anchor
            if anchor.parent is not None:
                source = anchor.cells[part.component.index].device
                assert source is not None
                self.copy(part.component, source, part.live)
                self.copies_on_write += 1

    def note_boundary(self, request: Request, page: int) -> None:
        """The live states stand at boundary `page`: due to be kept before the model goes on.

        The copy waits until then, because a request that ends here donates the state itself (I7).
        Page 0 stands for no boundary: a state that was due and not kept has been overwritten.
        """
        #   POINT     a promised point is at `page`      GRID, LEFT   in the prompt, if wanted there
        #   DECODED   behind the prompt, every `decode_pages`          elsewhere nothing is due
        due_as = DECODED
        parts = request.state_components
        for part in parts:
            if part.due and part.due_as is POINT:
                # It was promised and not kept, and the model has overwritten it (I11).
                self.points.skip(request, part.due, PASSED)
                part.account.forgo(1)
        ahead = request.checkpoints
        while ahead and ahead[0] != page and ahead[0] * self.tree.page_size <= request.computed:
            self.points.skip(request, ahead.pop(0), PASSED)
            for part in parts:
                part.account.forgo(1)  # promises without a point are given up (I12)
        if ahead and ahead[0] == page:
            request.last_point = ahead.pop(0)
            due_as = POINT
        elif page and request.computed < request.prompt:
            if self.points.on_grid(request, page):
                due_as = Due.GRID
            elif self.points.leaves_state(request, page):
                due_as = Due.LEFT
            else:
                page = 0
        elif request.total <= request.prompt or page % self.points.decode_pages:
            page = 0
        for part in parts:
            part.due, part.due_as = page, due_as

    def settle_due(self, request: Request) -> None:
        """Decide on a state that was not promised: all components keep it, or none does (I10)."""
        #   GRID   kept if headroom > 0 in every pool; else the point counts as skipped
        #   LEFT   the same, if a slot is free or holds an evict-first state; else dropped silently
        if not request.state_components:
            return
        first = request.state_components[0]
        page, due_as = first.due, first.due_as
        if not page or first.live is None or due_as in (POINT, DECODED):
            return
        for part in request.state_components:
            component, ledger = part.component, part.account.ledger
            spare = ledger.headroom > 0
            if due_as is Due.LEFT:
                spare = spare and (
                    ledger.room > 0
                    or eviction.has_left_behind(self.tree, component, request.root.tenant)
                )
            if not spare:
                if due_as is Due.GRID:
                    request.points.setdefault(page, GRID)
                    self.points.skip(request, page, _no_headroom(component))
                for each in request.state_components:
                    each.due = 0
                return
        for part in request.state_components:
            part.account.add(1)
            part.due_as = POINT
        if due_as is Due.GRID:
            request.points[page] = GRID
            request.last_point = page
        else:
            request.left |= {page}
            request.last_left = page

    def keep_due(self, request: Request, part: RequestState) -> None:
        """Copy the live state if it is due, as a captured one or as the decode's last boundary.

        Without a slot the point is skipped (I11); nothing fails.
        """
        if not part.due or part.live is None:
            return
        page, component = part.due, part.component
        if part.due_as is DECODED:
            if part.tracked is None:
                part.tracked = self._take_state(request, part)
            if part.tracked is not None:
                self.copy(component, part.live, part.tracked)
                part.tracked_page = page
        else:
            slot = self._take_state(request, part)
            if slot is None:
                self.points.skip(request, page, _no_headroom(component))
            else:
                self.copy(component, part.live, slot)
                part.captured[page] = slot
        # Last: if room is still being made, the engine calls again, and the state must be due.
        part.due = 0

    def keep_due_states(self, request: Request, page: int) -> int:
        """Keep the states due as captured ones; the deepest page with a state of every component.

        At most `page`, which the request stands on.
        """
        self.settle_due(request)
        for part in request.state_components:
            if part.due and part.due_as is not DECODED:
                self.keep_due(request, part)
            page = min(page, max([part.shared, *part.captured]))
        return page

    def offered_page(self, request: Request, part: RequestState) -> int:
        """The deepest boundary at which an ending request has a state to donate; 0 if none."""
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and part.live is not None:
            return page
        tracked = part.tracked_page if part.tracked is not None else 0
        return max([tracked, part.shared, *part.captured])

    def offer_states(self, request: Request, part: RequestState) -> None:
        """Put the states that an ending request can donate among its captured ones (I7)."""
        page, rest = divmod(request.computed, self.tree.page_size)
        if not rest and page and part.live is not None:
            self._offer(part, page, part.live)
            part.live = None
        elif part.tracked is not None:
            self._offer(part, part.tracked_page, part.tracked)
            part.tracked = None

    def _offer(self, part: RequestState, page: int, slot: bytes) -> None:
        duplicate = part.captured.pop(page, None)
        if duplicate is not None:
            part.account.ledger.give_private(duplicate)
            part.account.held -= 1
        part.captured[page] = slot

    def _take_state(self, request: Request, part: RequestState) -> bytes | None:
        """One promised state slot, or one from the headroom; None if there is neither."""
        account = part.account
        if account.promised < 1 and account.ledger.headroom < 1:
            return None
        if account.ledger.room < 1:
            self.evictor.ensure_promised(part.component, 1, request.root.tenant, account.promised)
        return account.take(1)

    def copy(self, component: TreeComponent, source: bytes, target: bytes) -> None:
        """Copy states, one or several at once."""
        self.mounted[component.index].component.device.copy_slots(source, target)


def _ahead(part: RequestComponent, page: int) -> tuple[Span, ...]:
    """The pages that a request at boundary `page` still needs of its own."""
    return (*part.component.reach_pages.spans(page), Span(page, NO_PAGE))


def _no_headroom(component: TreeComponent) -> str:
    """Why a state that was not promised a slot is not kept."""
    capacity = component.device.capacity
    return f"component {component.name!r}: all {capacity} states are in use or promised"
