"""Whether a request waits only for pages that another computes, and no longer than it may (A8)."""

from __future__ import annotations

from kvgraft.admission.decision import Decision, Outcome
from kvgraft.errors import ContractViolation
from kvgraft.requests.request import ADMITTED, Pending, Request
from kvgraft.tree.keys import TOKEN_BYTES
from kvgraft_guard.books import Counts, Reading
from kvgraft_guard.watched import Watched

__all__ = ["Waits"]


class Waits:
    """Checks one call of `admit` for a request that may be deferred.

    Made before the call; `check` is called after it.
    """

    def __init__(self, watched: Watched, request: Request) -> None:
        self.watched = watched
        self.request = request
        self._deferrals_left = request.deferrals_left
        self._deferred = request.deferred
        self._points = {
            id(each): set(each.points)
            for each in watched.cache.requests.values()
            if request.deferrals_left and each.stage is ADMITTED
        }

    def check(self, decision: Decision, *, renewed: bool) -> None:
        """The decision names a true reason to wait, and the request matches again afterwards.

        Raises:
            ContractViolation: A8 for a wait without end or for nobody, T11 for another namespace,
                M1 for other tokens than named or an old match, A9 for a trace on other requests.
        """
        request, pending = self.request, decision.pending
        if (self._deferred and not renewed) or (pending is not None and not request.deferred):
            raise ContractViolation(
                "M1", None, f"{_of(request)} was deferred, and is not matched again for it"
            )
        left = self._deferrals_left - (pending is not None)
        if request.deferrals_left != left or left < 0:
            raise ContractViolation(
                "A8",
                None,
                f"{decision}: {_of(request)} could be deferred {self._deferrals_left} times, now "
                f"{request.deferrals_left}",
            )
        if pending is not None:
            self._check_pending(pending)
            if decision.outcome is not Outcome.DEFERRED or decision.shortages:
                raise ContractViolation(
                    "A8", None, f"{decision}: only one that would be admitted waits for pages"
                )
        self._check_points(pending)

    def _check_pending(self, pending: Pending) -> None:
        request, by, tokens = self.request, pending.by, pending.tokens
        tree, running = self.watched.tree, self.watched.cache.requests
        if running.get(id(by)) is not by or by.stage is not ADMITTED:
            raise ContractViolation(
                "A8", None, f"{_of(request)} waits for one that is {by.stage.value}: {pending}"
            )
        if by.namespace != request.namespace or by.key.namespace != request.namespace:
            raise ContractViolation(
                "T11",
                None,
                f"{_of(request)} of namespace {request.namespace!r} waits for data of "
                f"{by.namespace!r}",
            )
        end = tokens * TOKEN_BYTES
        mine, theirs = request.key.data, by.key.data
        if (
            tokens % tree.page_size
            or by.root in tree.cleared
            or not request.anchor_tokens < tokens < request.prompt
            or not by.cached * tree.page_size < tokens <= by.prompt
            or pending.computed != by.computed
            or len(theirs) < end
            or mine[:end] != theirs[:end]
        ):
            raise ContractViolation(
                "M1",
                None,
                f"{_of(request)}, resuming at {request.anchor_tokens}, waits for {pending}: that "
                f"one has {by.prompt}, of which {by.computed} are computed and "
                f"{by.cached * tree.page_size} shared",
            )
        if self.watched.cache.points.matter and tokens // tree.page_size not in by.points:
            raise ContractViolation(
                "I10",
                None,
                f"{_of(request)} waits for {pending}, where that one leaves no resume point",
            )

    def _check_points(self, pending: Pending | None) -> None:
        """At most the one point that is waited for is new (A9)."""
        size = self.watched.tree.page_size
        for each in self.watched.cache.requests.values():
            known = self._points.get(id(each))
            if known is None or each is self.request:
                continue
            new = each.points.keys() - known
            named = pending is not None and pending.by is each
            if known - each.points.keys() or (
                new and not (named and pending is not None and new == {pending.tokens // size})
            ):
                raise ContractViolation(
                    "A9",
                    None,
                    f"admission of {_of(self.request)} changed the points of {_of(each)} from "
                    f"{sorted(known)} to {sorted(each.points)}",
                )

    def without_point(self, decision: Decision, now: Reading) -> Reading:
        """The books without the promise of a requested point: a state of each pool."""
        pending = decision.pending
        if pending is None or pending.by.points.keys() == self._points.get(id(pending.by)):
            return now
        risen = {part.component.index for part in pending.by.state_components}
        counts: list[Counts] = [
            (free, evictable, pinned, private, in_flight, promised - (at in risen))
            for at, (free, evictable, pinned, private, in_flight, promised) in enumerate(now.counts)
        ]
        return now._replace(counts=counts)


def _of(request: Request) -> str:
    return f"the request of {request.prompt} tokens"
