"""Clauses about a component's demands (A)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvgraft.admission.decision import SLACK_PAGES, default_demand
from kvgraft.packages.dispatch import Mounted
from kvgraft.reach import PageReach
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.tree import Tree
from kvgraft.types import Demand, DemandQuery, Tier
from kvgraft_testing.clause import clause, expect
from kvgraft_testing.production.clocks import clocks_moved
from kvgraft_testing.subject import Subject

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


def _budgets_states(subject: Subject) -> str | None:
    return _budgets(subject) or (None if subject.is_state else "about states; it has pages")


def _budgets_pages(subject: Subject) -> str | None:
    return _budgets(subject) or ("about pages; it has states" if subject.is_state else None)


def _budgets_a_window(subject: Subject) -> str | None:
    return _budgets(subject) or subject.unbounded


class Answered(NamedTuple):
    """A component's demand for one request.

    Attributes:
        query: the request.
        demand: the component's, or the core's if that is None.
        default: the core's, from the reach.
        per_page: slots of a page.
        is_own: whether the component answered.
    """

    query: DemandQuery
    demand: Demand
    default: Demand
    per_page: int
    is_own: bool

    @property
    def total(self) -> int:
        """Slots of the device pool, now and later."""
        return _sum(self.demand)


def _answers(
    subject: Subject,
    host_slots: int = 0,
    requests: Callable[[int], Iterable[DemandQuery]] = queries,
) -> Iterator[Answered]:
    for page_size in subject.page_sizes:
        mounted = subject.mount(page_size)
        component = _component(mounted, page_size)
        assert mounted.budget_contribution is not None
        for query in requests(page_size):
            asked = query._replace(host_slots=host_slots)
            default = default_demand(component, asked)
            answer = mounted.budget_contribution(asked)
            demand = default if answer is None else answer
            yield Answered(query, demand, default, component.slots_per_page, answer is not None)


def _sum(demand: Demand) -> int:
    return demand.now + demand.later


def _component(mounted: Mounted, page_size: int) -> TreeComponent:
    """The component as admission sees it."""
    component = mounted.component
    device = {mounted.name: Ledger(mounted.name, Tier.DEVICE, component.device.allocator)}
    host = {}
    if component.host is not None:
        host[mounted.name] = Ledger(mounted.name, Tier.HOST, component.host.allocator)
    return Tree(page_size, [mounted.shape], device, host).components[0]


def _step(subject: Subject, query: DemandQuery) -> int:
    """Pages with slots that the next step begins."""
    stored = PageReach(subject.reach, query.page_size).stored_pages
    held = -(-query.computed // query.page_size)
    end = -(-(query.computed + query.chunk) // query.page_size)
    return min(end, stored) - min(held, stored)


@clause("A1", "A demand holds the pages of the next step, in the pool's own slots.", needs=_budgets)
def the_next_step_is_in_the_demand(subject: Subject) -> None:
    for query, demand, _, per_page, _ in _answers(subject):
        step = _step(subject, query) * per_page
        least = 1 if subject.is_state else step
        expect(
            min(demand.now, demand.later, *demand.private) >= 0,
            "A1",
            subject,
            f"{demand} asks for a negative number of slots: {query}",
        )
        expect(demand.now >= least, "A1", subject, f"{demand} for a step of {least} slots: {query}")


@clause(
    "A1",
    "A demand holds all that the reach will take at once, and one page of slack.",
    needs=_budgets_pages,
)
def the_reach_is_in_the_demand(subject: Subject) -> None:
    for each in _answers(subject):
        query = each.query
        step = _step(subject, query)
        least = (step + SLACK_PAGES) * each.per_page
        if subject.reach.is_prefix_closed or subject.is_window:
            # Other reaches may be narrower at some boundaries than at their widest.
            least = _sum(each.default)
        expect(
            each.total >= least,
            "A1",
            subject,
            f"{each.demand} where {least} slots are taken at once, {each.per_page} of them slack: "
            f"{query}",
        )


@clause("A3", "Host hits are in the demand once, in slots.", needs=_budgets)
def host_hits_are_counted_once(subject: Subject) -> None:
    hits = 3
    without = {each.query: each for each in _answers(subject)}
    for each in _answers(subject, hits):
        alone = without[each.query]
        more = each.total - alone.total
        if each.is_own is not alone.is_own:
            # It may ask for more than the core would, whenever it answers; not for less.
            more = hits if more >= hits or each.total >= _sum(each.default) else more
        expect(
            more == hits,
            "A3",
            subject,
            f"{hits} host hits raise the demand by {more} slots, from {alone.demand} to "
            f"{each.demand}: {each.query}",
        )


@clause("A10", "A state component budgets the live state, copies included.", needs=_budgets_states)
def states_are_budgeted_with_their_copies(subject: Subject) -> None:
    for query, demand, _, _, _ in _answers(subject):
        least = 1 + query.checkpoints
        expect(
            demand.now >= 1 and demand.now + demand.later >= least,
            "A10",
            subject,
            f"{demand} for a live state and {query.checkpoints} to capture",
        )


LONG_PAGES = (50, 100, 400, 800)
"""Pages of prompts that are much longer than a small window."""

MAX_DEMAND_FACTOR = 2
"""A component may demand this multiple of the core's demand, plus eight pages."""


def _long(page_size: int) -> Iterator[DemandQuery]:
    for n_pages in LONG_PAGES:
        tokens = n_pages * page_size
        yield DemandQuery(page_size, 0, page_size, tokens, tokens, 0, 0)


@clause("A4", "A bounded reach bounds the demand.", needs=_budgets_a_window)
def a_window_bounds_the_demand(subject: Subject) -> None:
    longest: dict[int, Answered] = {}
    for each in _answers(subject, requests=_long):
        most = MAX_DEMAND_FACTOR * (_sum(each.default)) + 8 * each.per_page
        expect(
            each.total <= most,
            "A4",
            subject,
            f"{each.demand} for a prompt of {each.query.prompt // each.query.page_size} pages; "
            f"the reach takes {each.default}",
        )
        before = longest.get(each.query.page_size, each)
        wide = before.query.prompt > subject.reach.width_tokens + 2 * each.query.page_size
        expect(
            not wide or each.total == before.total,
            "A4",
            subject,
            f"a longer prompt raises the demand from {before.demand} to {each.demand}",
        )
        longest[each.query.page_size] = each


def _budgets_private_slots(subject: Subject) -> str | None:
    if not subject.mount(subject.page_size).component.private:
        return "it has no private pool"
    return _budgets(subject)


@clause(
    "A8",
    "Where a fresh request fits the private pools, the same one fits when it resumes.",
    needs=_budgets_private_slots,
)
def a_resumed_request_fits_the_private_pools(subject: Subject) -> None:
    capacities = {
        page_size: [pool.allocator.capacity for pool in subject.mount(page_size).component.private]
        for page_size in subject.page_sizes
    }

    def fits(each: Answered) -> bool:
        pools = capacities[each.query.page_size]
        return all(asked <= held for asked, held in zip(each.demand.private, pools))

    answers = list(_answers(subject))
    fresh = {_request(each) for each in answers if not each.query.computed and fits(each)}
    for each in answers:
        expect(
            fits(each) or _request(each) not in fresh,
            "A8",
            subject,
            f"private pools of {capacities[each.query.page_size]} slots, a fresh request fits; "
            f"resumed it is budgeted {each.demand.private}: {each.query}",
        )


@clause(
    "H7",
    "A request that resumes is budgeted slots of every private pool that a fresh one takes of.",
    needs=_budgets_private_slots,
)
def a_resumed_request_has_private_slots(subject: Subject) -> None:
    answers = list(_answers(subject))
    fresh = {_request(each): each.demand.private for each in answers if not each.query.computed}
    for each in answers:
        asked, before = each.demand.private, fresh[_request(each)]
        expect(
            all(now or not was for now, was in zip(asked, before)),
            "H7",
            subject,
            f"a fresh request is budgeted private slots {before}, resumed it is {asked}: "
            f"{each.query}",
        )


def _request(each: Answered) -> tuple[int, int, int]:
    """The part of a query that stays the same while a request is computed."""
    return each.query.page_size, each.query.prompt, each.query.total


DAY_S = 86_400
"""By how much the clock is moved."""


@clause("D1", "The same request is budgeted the same way, at any time.", needs=_budgets)
def a_demand_is_repeatable(subject: Subject) -> None:
    first = [each.demand for each in _answers(subject)]
    second = [each.demand for each in _answers(subject)]
    expect(first == second, "D1", subject, "equal requests are budgeted differently")
    for days in (0.0001, 1, 3.3):
        with clocks_moved(days * DAY_S):
            later = [each.demand for each in _answers(subject)]
        said = f"equal requests are budgeted differently {days} days later"
        expect(first == later, "D1", subject, said)
