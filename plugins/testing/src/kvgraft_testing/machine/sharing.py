"""Checks of waits for pages that another request computes, on token tuples alone (A8)."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.admission import Decision
from kvgraft.requests.request import Pending
from kvgraft.types import PointKind
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.live import Live

__all__ = ["Sharing", "Standing"]


class Standing(NamedTuple):
    """A request before it asks for admission.

    Attributes:
        deferred: whether its last call was deferred for another's pages.
        deferrals_left: how many more may be.
    """

    deferred: bool
    deferrals_left: int


class Sharing:
    """Compares pending pages with the tokens of all requests."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.model, self.judge = bench.model, bench.judge
        self._never = bench.predictor.cannot_copy

    def before(self, live: Live) -> Standing:
        """The request before its call."""
        return Standing(live.waits, live.deferrals_left)

    def decided(self, live: Live, decision: Decision) -> None:
        """Follow a decision: a wait costs a deferral, and may make another leave a point.

        Called before the cache's books are compared with the model's.
        """
        pending = decision.pending
        live.waits = pending is not None
        if pending is None:
            return
        self.bench.counts["waits for another's pages"] += 1
        live.deferrals_left -= 1
        by, page = self._leader(pending), pending.tokens // self.model.page_size
        if by is None or not self.bench.resuming.matters or page in by.own.points:
            return
        if page not in by.request.points:
            return
        by.own.points.add(page)
        by.kinds[page] = PointKind.BRANCH
        if self.bench.states:
            by.due.add(page)
        self.bench.counts["asked for a point"] += 1

    def check(self, live: Live, decision: Decision, standing: Standing) -> None:
        """It waits only for a true reason, and at most as often as it may."""
        pending, request = decision.pending, live.request
        self.judge.expect(
            request.deferrals_left == live.deferrals_left >= 0,
            "A8",
            None,
            lambda: (
                f"{live.name} may be deferred {request.deferrals_left} times more, not "
                f"{live.deferrals_left}: {decision}"
            ),
        )
        agreed = {
            other.name: self._agreed(live, other)
            for other in self.bench.live
            if other.admitted and other is not live
        }
        if pending is not None:
            self._check_pending(live, pending, agreed)
            self._check_room(live)
        elif decision.admitted and standing.deferrals_left and not self._never:
            left = self._ahead(live, agreed)
            self.judge.expect(
                not left,
                "A8",
                None,
                lambda: (
                    f"{live.name} resumes at page {live.anchor} and waits for none of {left}, "
                    "which compute more of its prompt"
                ),
            )

    def _check_pending(self, live: Live, pending: Pending, agreed: dict[str, int]) -> None:
        size = self.model.page_size
        by = self._leader(pending)
        if by is None:
            self.judge.fail("A8", None, f"{live.name} waits for {pending.by!r}, which has ended")
            return
        self.judge.expect(
            by.admitted, "A8", None, lambda: f"{live.name} waits for {by.name}, not admitted"
        )
        self.judge.expect(
            by.namespace == live.namespace,
            "T11",
            None,
            lambda: f"{live.name} of {live.namespace!r} waits for {by.name} of {by.namespace!r}",
        )
        said = f"{live.name}, at page {live.anchor}, waits for {pending.tokens} tokens of {by.name}"
        shared = agreed.get(by.name, 0)
        self.judge.expect(
            pending.tokens % size == 0 and live.anchor * size < pending.tokens <= shared * size,
            "M1",
            None,
            lambda: f"{said}, with which it shares {shared} pages of {size}",
        )
        self.judge.expect(
            pending.computed == by.computed and pending.tokens > by.cached * size,
            "M1",
            None,
            lambda: f"{said}, which computed {by.computed} and shared {by.cached} pages: {pending}",
        )
        deepest = max(self._ahead(live, agreed).values(), default=0)
        self.judge.expect(
            pending.tokens >= deepest * size,
            "A8",
            None,
            lambda: f"{said}; another computes {deepest} pages of it",
        )

    def _check_room(self, live: Live) -> None:
        """One that waits for pages alone could be admitted, the point it asked for included."""
        for part in live.request.components:
            name, needed = part.component.name, part.demand.now + part.demand.later
            room = self.bench.seen.headroom(name, "device", live.namespace)
            if needed > room:
                said = f"{live.name} waits for pages, and needs {needed} slots of {room}"
                self.judge.fail("A12", name, said)

    def _leader(self, pending: Pending) -> Live | None:
        return next((each for each in self.bench.live if each.request is pending.by), None)

    def _agreed(self, live: Live, other: Live) -> int:
        """Whole pages that two prompts have in common and that the first may resume behind."""
        if other.namespace != live.namespace:
            return 0
        size = self.model.page_size
        pages = min((live.prompt - 1) // size, other.prompt // size)
        while live.tuple[: pages * size] != other.tuple[: pages * size]:
            pages -= 1
        return pages

    def _ahead(self, live: Live, agreed: dict[str, int]) -> dict[str, int]:
        """By request, the boundary that it is about to share and that lies behind the anchor."""
        found = {
            other.name: (self._boundary(other, agreed[other.name]), other.cached)
            for other in self.bench.live
            if other.name in agreed
        }
        return {
            name: boundary
            for name, (boundary, cached) in found.items()
            if boundary > max(live.anchor, cached)
        }

    def _boundary(self, other: Live, pages: int) -> int:
        """The deepest boundary up to `pages` at which a request leaves all data; 0 for none."""
        if not self.bench.resuming.matters:
            return pages
        return max([page for page in other.own.points if page <= pages], default=0)
