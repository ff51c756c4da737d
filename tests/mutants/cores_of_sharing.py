"""More cores with one defect each: requests that wait for pages that another computes."""

from __future__ import annotations

from typing import Any

from kvgraft.admission.decision import Decision
from kvgraft.requests.request import CLOSED, Pending, Request
from kvgraft.serving import Serving
from kvgraft_scheduling.pending import PendingPages

from .cores import Patch, mutant
from .cores_held_out import edited

__all__: list[str] = []


@mutant("everything", "A8")
def a_request_waits_for_pages_without_end(patch: Patch) -> None:
    edited(Serving._defer, "request.deferrals_left -= 1", "pass")(patch)


@mutant("everything", "A8")
def a_request_waits_for_one_that_has_ended(patch: Patch) -> None:
    find = PendingPages.find
    known: dict[int, Pending] = {}

    def late(self: PendingPages, request: Request) -> Pending | None:
        pending = find(self, request)
        before = known.get(id(request))
        if before is not None and before.by.stage is CLOSED and request.deferred is False:
            return before
        if pending is not None:
            known[id(request)] = pending
        return pending

    patch.setattr(PendingPages, "find", late)


@mutant("everything", "T11")
def a_request_waits_for_another_namespaces_pages(patch: Patch) -> None:
    edited(PendingPages._sharing, "or by.root is not request.root", "")(patch)


@mutant("everything", "M1")
def a_request_that_was_deferred_is_not_matched_again(patch: Patch) -> None:
    deferred = Serving._defer

    def forgetful(self: Serving, request: Request) -> Decision | None:
        decision = deferred(self, request)
        request.deferred = False
        return decision

    patch.setattr(Serving, "_defer", forgetful)


@mutant("everything", "M1")
def more_is_pending_than_is_shared(patch: Patch) -> None:
    edited(PendingPages._boundary, "return pages", "return pages + 1")(patch)


@mutant("everything", "M1")
def shared_pages_stay_pending(patch: Patch) -> None:
    edited(PendingPages.find, "by.cached * size", "0")(patch)


@mutant("everything", "A8")
def nobody_is_waited_for(patch: Patch) -> None:
    def nobody(self: Any, request: Request) -> None:
        del self, request

    patch.setattr(PendingPages, "find", nobody)


@mutant("everything+state", "I12", "A7", "A12")
def a_point_is_asked_for_without_a_promise(patch: Patch) -> None:
    edited(PendingPages.ask_for_point, "part.account.add(1)", "pass")(patch)


@mutant("everything+window+state", "I12", "A7", "I11")
def a_point_asked_for_lies_where_the_request_has_been(patch: Patch) -> None:
    edited(PendingPages.ask_for_point, "each.pages * size > each.by.computed and", "")(patch)
