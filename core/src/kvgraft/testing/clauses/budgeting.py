"""What a component asks of admission (A)."""

from __future__ import annotations

from collections.abc import Iterator

from kvgraft.testing.clause import clause, expect
from kvgraft.testing.subject import PAGE_SIZES, Subject
from kvgraft.types import Demand, DemandQuery

__all__ = ["queries"]


def queries(page_size: int) -> Iterator[DemandQuery]:
    """Requests of every shape: fresh and resumed, whole and chunked, with and without decode."""
    for prompt in (1, 5, 12, 40):
        for computed in {0, prompt // 2 // page_size * page_size}:
            for chunk in {1, min(4, prompt - computed), prompt - computed}:
                for reserve in (0, 3, 17):
                    for checkpoints in (0, 1, 2):
                        yield DemandQuery(
                            page_size, computed, chunk, prompt, prompt + reserve, 0, checkpoints
                        )


def _budgets(subject: Subject) -> str | None:
    return None if subject.has("budget_contribution") else "the hook is left to the core"


def _answers(subject: Subject, host_slots: int = 0) -> Iterator[tuple[DemandQuery, Demand, int]]:
    for page_size in PAGE_SIZES:
        mounted = subject.mount(page_size)
        assert mounted.budget_contribution is not None
        for query in queries(page_size):
            answer = mounted.budget_contribution(query._replace(host_slots=host_slots))
            if answer is not None:
                yield query, answer, mounted.component.slots_per_page


@clause("A1", "A demand holds the pages of the next step, in the pool's own slots.", needs=_budgets)
def the_next_step_is_in_the_demand(subject: Subject) -> None:
    for query, demand, per_page in _answers(subject):
        held = -(-query.computed // query.page_size)
        step = (-(-(query.computed + query.chunk) // query.page_size) - held) * per_page
        least = 1 if subject.is_state else step
        whole = all(n >= 0 and n == int(n) for n in (demand.now, demand.later, *demand.private))
        expect(whole, "A1", subject, f"{demand} is not in whole slots")
        expect(demand.now >= least, "A1", subject, f"{demand} for a step of {least} slots: {query}")


@clause("A3", "Host hits are in the demand once, in slots.", needs=_budgets)
def host_hits_are_counted_once(subject: Subject) -> None:
    hits = 3
    without = {query: demand for query, demand, _ in _answers(subject)}
    for query, demand, _ in _answers(subject, hits):
        alone = without[query]
        more = demand.now + demand.later - alone.now - alone.later
        expect(
            more == hits,
            "A3",
            subject,
            f"{hits} host hits raise the demand by {more} slots, from {alone} to {demand}: {query}",
        )


@clause("A10", "A state component budgets the live state, copies included.", needs=_budgets)
def states_are_budgeted_with_their_copies(subject: Subject) -> None:
    if not subject.is_state:
        return
    for query, demand, _ in _answers(subject):
        least = 1 + query.checkpoints
        expect(
            demand.now >= 1 and demand.now + demand.later >= least,
            "A10",
            subject,
            f"{demand} for a live state and {query.checkpoints} to capture",
        )


@clause("A4", "A bounded reach bounds the demand.", needs=_budgets)
def a_window_bounds_the_demand(subject: Subject) -> None:
    for page_size in PAGE_SIZES:
        mounted = subject.mount(page_size)
        component = mounted.component
        hook = mounted.budget_contribution
        assert hook is not None
        if component.reach.is_everything or component.reach.is_state:
            return
        long = DemandQuery(page_size, 0, page_size, 400 * page_size, 400 * page_size, 0, 0)
        longer = long._replace(prompt=800 * page_size, total=800 * page_size)
        one, two = hook(long), hook(longer)
        expect(
            one is None or two is None or sum(one[:2]) == sum(two[:2]),
            "A4",
            subject,
            f"a prompt twice as long raises the demand from {one} to {two}",
        )


@clause("D1", "The same request is budgeted the same way.", needs=_budgets)
def a_demand_is_repeatable(subject: Subject) -> None:
    first = [demand for _, demand, _ in _answers(subject)]
    second = [demand for _, demand, _ in _answers(subject)]
    expect(first == second, "D1", subject, "equal requests are budgeted differently")
