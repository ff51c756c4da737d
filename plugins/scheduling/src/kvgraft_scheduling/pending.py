"""Pages that a running request computes and that a waiting one could resume from.

Two requests with a common prefix that run at the same time would compute it twice. The second may
be deferred instead, a bounded number of times, until the first has shared it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvgraft.compiled import mypyc_attr
from kvgraft.requests.request import ADMITTED, LEASED, Pending, Request
from kvgraft.requests.resume_points import BRANCH, ResumePoints
from kvgraft.tree.keys import common_prefix_pages
from kvgraft.tree.tree import Tree

__all__ = ["PendingPages"]


class _Shared(NamedTuple):
    """An admitted request that has whole pages in common with one that waits.

    Attributes:
        by: that request.
        pages: how many.
    """

    by: Request
    pages: int


@mypyc_attr(allow_interpreted_subclasses=True)
class PendingPages:
    """Searches one cache's requests for those that compute pages that another will need.

    Admitted requests are compared one by one: first a single page of each, then the prefix of those
    that agree there. Nothing is kept between two searches.

    Args:
        tree: of the same cache.
        points: where requests leave the data of all components.
        requests: those that have not ended, oldest first; the cache's own, by their `id()`.
        can_wait: whether a match ever has a prefix to resume from.
    """

    def __init__(
        self,
        tree: Tree,
        points: ResumePoints,
        requests: Mapping[int, Request],
        *,
        can_wait: bool,
    ) -> None:
        self.tree = tree
        self.points = points
        self.requests = requests
        self.can_wait = can_wait

    def find(self, request: Request) -> Pending | None:
        """The deepest boundary that another request is about to share; None for none.

        Of several requests the one furthest on, then the oldest: every rank finds the same (D1).
        """
        size = self.tree.page_size
        found: Pending | None = None
        for by, pages in self._sharing(request):
            boundary = self._boundary(by, pages) * size
            if boundary <= max(request.anchor_tokens, by.cached * size):
                continue
            if found is None or (boundary, by.computed) > (found.tokens, found.computed):
                found = Pending(boundary, by.computed, by)
        return found

    def ask_for_point(self, request: Request) -> None:
        """Let a request leave a resume point where its sequence and a waiting one's part (I10).

        Without it, components that do not need every page would lack data at that boundary. The
        point costs a state of each state component, which must be spare beside those of the waiting
        request, and may cost a cut of the prefill: then it must save `cut_tokens`. If it cannot be
        made, the request waits for the last point before.
        """
        if not self.points.matter:
            return
        size = self.tree.page_size
        deepest: _Shared | None = None
        for each in self._sharing(request):
            if each.pages * size > each.by.computed and (
                deepest is None
                or (each.pages, each.by.computed) > (deepest.pages, deepest.by.computed)
            ):
                deepest = each
        if deepest is None:
            return
        by, page = deepest
        pending = self.find(request)
        before = (request.anchor_tokens if pending is None else pending.tokens) // size
        if page - before < (self.points.cut_pages if self.points.cuts else 1) or page <= before:
            return
        for mine, part in zip(request.state_components, by.state_components):
            if part.account.ledger.headroom <= mine.demand.now + mine.demand.later:
                return
        for part in by.state_components:
            part.account.add(1)
        by.points[page] = BRANCH
        if by.state_components:
            insort(by.checkpoints, page)

    def _sharing(self, request: Request) -> Iterator[_Shared]:
        """Admitted requests whose prompt agrees with the request's behind its anchor, too."""
        page_bytes = self.tree.page_bytes
        data, anchor = request.key.data, request.anchor_tokens // self.tree.page_size
        limit = (request.prompt - 1) // self.tree.page_size
        if request.stage is not LEASED or anchor >= limit or not self.can_wait:
            return
        if request.root in self.tree.cleared:  # it matches in the new tree when it is admitted
            return
        offset = anchor * page_bytes
        page = bytes(data[offset : offset + page_bytes])
        for by in self.requests.values():
            if by.stage is not ADMITTED or by.root is not request.root:
                continue
            theirs = by.key.data
            if not theirs.startswith(page, offset) or not by.has_same_key():
                continue
            agreed = common_prefix_pages(data, 0, theirs, page_bytes)
            pages = min(agreed, limit, by.prompt // self.tree.page_size)
            if pages > anchor:
                yield _Shared(by, pages)

    def _boundary(self, by: Request, pages: int) -> int:
        """The deepest of the first boundaries at which a request leaves all components' data."""
        if not self.points.matter:
            return pages
        return max([page for page in by.points if page <= pages], default=0)
