"""The pages a running request owns: taken from promises, left behind, or given back."""

from __future__ import annotations

from collections.abc import Sequence

from kvgraft.compiled import mypyc_attr
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.parts import Part
from kvgraft.requests.request import Request
from kvgraft.requests.runs import NO_PAGE, divided, needed_between
from kvgraft.tree.inserting import Run
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

__all__ = ["PageSlots"]


@mypyc_attr(allow_interpreted_subclasses=True)
class PageSlots:
    """Moves slots of pages between pools and running requests."""

    def __init__(self, tree: Tree, evictor: Evictor) -> None:
        self.tree = tree
        self.evictor = evictor

    def allocate_pages(self, request: Request, pages: int) -> bool:
        """Slots for the next `pages` pages, of every paged component or of none."""
        first, end = request.allocated, request.allocated + pages
        needs: list[tuple[Part, int]] = []
        for part in request.parts:
            component = part.component
            if component.is_state:
                continue
            n = component.stored_between(first, end) * component.slots_per_page
            if not part.has_promised(n) and any(
                short > ledger.headroom for ledger, short in part.beyond_promise(n)
            ):
                return False
            if n:
                needs.append((part, n))
        for part, n in needs:
            if n > part.account.ledger.room:
                promised = part.account.promised
                self.evictor.make_room(part.component, n, request.root.tenant, promised)
            if part.host_account is not None:
                self.evictor.free_host(part.component, n, request.root.tenant)
        for part, n in needs:
            part.take_pages(first, n)
        request.allocated = end
        return True

    def left_behind(self, request: Request, page: int) -> int:
        """The end of the pages that bounded reaches at boundary `page` no longer cover; else 0."""
        end = 0
        for part in request.bounded_parts:
            component, runs = part.component, part.runs
            if not runs:
                continue
            if component.window_pages is not None:
                start = page - component.window_pages
                if runs[0].first < start:
                    end = max(end, start)
                continue
            _, behind = self._behind(part, page)
            if behind:
                end = max(end, behind[-1].end)
        return end

    def pages_behind(self, request: Request, page: int) -> int:
        """Pages of the component that holds most of the pages that `left_behind` names."""
        most = 0
        for part in request.bounded_parts:
            _, behind = self._behind(part, page)
            most = max(most, sum(run.end - run.first for run in behind))
        return most

    def has_promise_left(self, parts: Sequence[Part], pages: int) -> bool:
        """Whether the next `pages` pages of every paged part are promised."""
        for part in parts:
            component = part.component
            if part.account.promised < pages * component.slots_per_page and not component.is_state:
                return False
        return True

    def beyond_promise(
        self, request: Request, pages: int, page: int
    ) -> list[tuple[Ledger, int]] | None:
        """The slots, by pool, that the next `pages` pages need beside the promised ones.

        None if they do not fit once those behind boundary `page` are left behind.
        """
        first, end = request.allocated, request.allocated + pages
        found: list[tuple[Ledger, int]] = []
        for part in request.parts:
            component = part.component
            if component.is_state:
                continue
            n = component.stored_between(first, end)
            if not component.is_prefix_closed:
                n -= sum(run.end - run.first for run in self._behind(part, page)[1])
            if n > 0:
                found += part.beyond_promise(n * component.slots_per_page)
        return found if all(n <= ledger.headroom for ledger, n in found) else None

    def is_worth_keeping(self, request: Request, page: int) -> bool:
        """Whether a resume point needs any page that `left_behind` names."""
        for part in request.bounded_parts:
            _, behind = self._behind(part, page)
            for run in behind:
                if needed_between(
                    part.component, (*request.points, *request.left), run.first, run.end
                ):
                    return True
        return False

    def give_back_behind(self, request: Request, page: int) -> None:
        """Free private pages that bounded reaches at boundary `page` no longer cover (L6, I3)."""
        for part in request.bounded_parts:
            kept, behind = self._behind(part, page)
            if behind:
                part.runs = kept
                part.free_pages(behind)

    def _behind(self, part: Part, page: int) -> tuple[list[Run], list[Run]]:
        """A request's pages that the reach at boundary `page` covers, and those it left."""
        spans = (*part.component.reach_pages.spans(page), Span(page, NO_PAGE))
        return divided(part.runs, spans)
