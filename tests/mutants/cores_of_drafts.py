"""More cores with one line changed: passes with drafts, and their verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgraft.admission.promises import Budget
from kvgraft.requests.components import RequestComponent
from kvgraft.requests.publishing import Publisher
from kvgraft.requests.request import Request
from kvgraft.serving import Serving
from kvgraft_scheduling.stepping import Batch, Stepper

from .cores import CORES, CoreMutant, mutant
from .cores_held_out import edited

__all__: list[str] = []

Patch = pytest.MonkeyPatch


def change(
    name: str,
    kinds: str,
    rules: str,
    function: Callable[..., Any],
    old: str,
    new: str,
) -> None:
    """Register one."""
    CORES[name.replace(" ", "_")] = CoreMutant(
        tuple(kinds.split("+")), tuple(rules.split()), edited(function, old, new)
    )


change(
    "rejected drafts are computed",
    "everything+state",
    "G2 T11",
    Stepper._measure,
    "batch.noted = rows.given[at] - length if counts is None else counts",
    "batch.noted = rows.given[at] - length\n"
    "    if counts is not None and (counts > batch.noted).any():\n"
    "        batch.noted = counts",
)
change(
    "pages of drafts are shared",
    "everything",
    "T2 I6 B3",
    Publisher.checkpoint,
    "page = request.computed // self.tree.page_size",
    "page = request.allocated",
)
change(
    "a pass passes the boundary where a state is kept",
    "everything+state",
    "G4",
    Stepper._up_to_states,
    "return np.minimum(left, batch.n_tokens)",
    "return None",
)
change(
    "a pass ends a token behind its state",
    "everything+state",
    "G4",
    Stepper._up_to_states,
    "left = self.state_tokens - batch.length % self.state_tokens",
    "left = self.state_tokens + 1 - batch.length % self.state_tokens",
)
change(
    "a state is kept a token late",
    "everything+state",
    "G4 M8 I1",
    Stepper._keep_states,
    "stands = batch.length % self.state_tokens == 0",
    "stands = batch.length % self.state_tokens == 1",
)
change(
    "all drafts are told where a pass has fewer",
    "everything+state",
    "G4",
    Stepper.end,
    "told = torch.from_numpy(most if widths is None else widths)",
    "told = torch.from_numpy(most)",
)
change(
    "drafts behind a state have slots",
    "everything+state",
    "G4 T9",
    Stepper._slot_mapping,
    "mapping[beyond] = PADDING",
    "pass",
)
change(
    "a demand has no slots for drafts",
    "everything+state",
    "G1",
    Budget.decide,
    "request.draft_pages = self.points.draft_pages if request.total > request.prompt else 0",
    "request.draft_pages = 0",
)
change(
    "tokens are written behind the rejected drafts",
    "everything+state",
    "T9",
    Stepper.end,
    "length = self.rows.length[rows]",
    "length = self.rows.given[rows]",
)
change(
    "more tokens count than the pass had",
    "everything+state",
    "T11",
    Stepper._measure,
    "if np.count_nonzero(room < 0):",
    "if False:",
)
change(
    "a window is given up by the drafts ahead",
    "everything+window",
    "G3 L3 L6 I9 T9",
    Publisher.computed,
    "self.points.reached_from(request, at), ahead)",
    "self.points.reached_from(request, at) + request.draft_pages, ahead)",
)
change(
    "a pass after one of which nothing was right takes another page",
    "everything",
    "G2",
    Stepper._measure,
    "batch.end = np.maximum(pages, batch.first)",
    "batch.end = np.maximum(pages, batch.first + ((batch.noted == 0) & (batch.n_drafts > 0)))",
)
change(
    "finish reports a state that was evicted",
    "everything+state",
    "G6 I6",
    Publisher.finish,
    "if has_state:  # other states than its last one may have been evicted",
    "if False:",
)
change(
    "finish reports what was computed",
    "everything+state",
    "G6 I6",
    Publisher.finish,
    "page = max(page, request.cached)",
    "return request.computed // self.tree.page_size",
)


def _without_last_page(request: Request, part: RequestComponent, page_size: int) -> None:
    """Forget a page behind the verified tokens, if the request has one of its own."""
    if part.component.is_state or request.allocated * page_size - request.computed < page_size:
        return
    if part.holds_pages and part.runs[-1].end == request.allocated:
        last = part.runs[-1]
        part.runs = part.runs[:-1]
        if last.first < last.end - 1:
            part.runs = [*part.runs, last.cut(last.first, last.end - 1)]


@mutant("everything", "T8", "T9")
def slots_of_outstanding_drafts_are_lost_at_an_end(patch: Patch) -> None:
    finish = Publisher.finish

    def keeping(self: Publisher, request: Request, page: int) -> int:
        for part in request.components:
            _without_last_page(request, part, self.tree.page_size)
        return finish(self, request, page)

    patch.setattr(Publisher, "finish", keeping)


@mutant("everything", "T8", "T9")
def slots_of_outstanding_drafts_are_lost_at_an_abort(patch: Patch) -> None:
    abort = Serving.abort

    def keeping(self: Serving, request: Request) -> None:
        for part in request.components:
            _without_last_page(request, part, self.tree.page_size)
        abort(self, request)

    patch.setattr(Serving, "abort", keeping)


@mutant("everything", "T8", "T9")
def slots_of_outstanding_drafts_are_lost_at_a_restart(patch: Patch) -> None:
    restart = Serving.restart

    def keeping(self: Serving, request: Request) -> None:
        for part in request.components:
            _without_last_page(request, part, self.tree.page_size)
        restart(self, request)

    patch.setattr(Serving, "restart", keeping)


@mutant("everything+state", "T9", "T8")
def a_slot_of_a_rejected_draft_is_freed_and_kept(patch: Patch) -> None:
    note = Stepper.note

    def freeing(self: Stepper, batch: Batch) -> None:
        note(self, batch)
        for request in batch.requests:
            behind = request.allocated * self.tree.page_size - request.computed
            part = request.components[0]
            if behind >= self.tree.page_size and part.holds_pages:
                part.account.ledger.give_private(part.newest(1))

    patch.setattr(Stepper, "note", freeing)
