"""F4: a continuing chunk took all that remained, or ignored the budget once it was empty (A4, A5).

Components budgeted by their reach are promised their continuing chunks at admission. The field's
were not: only the first chunk was budgeted, later ones took the remaining slots. A component may
still do so, with a demand of its own; these tests bring one, of several reaches.
"""

from __future__ import annotations

import pytest

from kvgraft import Demand, DemandQuery, Everything, Leading, Reach, Trailing, hookimpl
from kvgraft.admission.promises import Budget
from kvgraft.requests.request import Request

from ..serving.components import PagedPackage
from ..serving.own_parts import given_parts
from ..serving.server import OutOfSlotsError, Server, ledgers, tree_dump
from ..serving.setups import SETUPS, Setup, mixed

PROMPT = 400
CHUNK = 64
LIMIT = 128


class LeanPackage(PagedPackage):
    """Asks for its first chunk and its load-back, and for nothing later."""

    @hookimpl
    def budget_contribution(self, component: object, query: DemandQuery) -> Demand:
        held = -(-query.computed // query.page_size)
        pages = -(-(query.computed + query.chunk) // query.page_size) - held
        return Demand(pages * self.slots_per_page + query.host_slots, 0)


SETUPS_OF_LEAN = {
    "everything": mixed((), LeanPackage("lean", Reach(Everything()))),
    "full+window": mixed(("full",), LeanPackage("lean", Reach(Trailing(512)))),
    "full+quartered": mixed(("full",), LeanPackage("lean", Reach(Trailing(512)), 4)),
    "full+sinks": mixed(("full",), LeanPackage("lean", Reach(Leading(64), Trailing(448)))),
}
REMAINING = [
    (64, 100, 64),
    (64, 64, 64),
    (64, 36, 0),
    (64, 0, 0),
    (1, 100, 100),
    (1, 64, 64),
    (1, 0, 0),
    (16, 100, 96),
    (16, 15, 0),
]
"""Page size, tokens that remain of the lean budget, the chunk that fits."""


def continue_with_little_left(
    setup: Setup, page_size: int, remaining: int, start: int, budget: type[Budget] = Budget
) -> int:
    """A prompt continues after `start` tokens while `remaining` tokens of the pool are left.

    Returns the chunk it was given, which must be allocatable.
    """
    pool = 640 // page_size * page_size + remaining % page_size
    cache = setup.open(
        page_size=page_size,
        device_tokens=4096,
        host_tokens=0,
        parts=given_parts(budget),
        lean={"device_tokens": pool},
    )
    server = Server(cache)
    try:
        request = server.start(range(PROMPT), chunk=CHUNK)
        server.step(request, cache.next_chunk(request, start))
        lean = cache.tree.by_name["lean"]
        # another request holds all but the slots to remain
        surplus = lean.device.headroom // lean.slots_per_page - remaining // page_size
        hog = server.start(range(9000, 9000 + surplus * page_size))
        assert cache.allocate(hog, surplus * page_size)
        free_pages = remaining // page_size + request.components[lean.index].account.promised // (
            lean.slots_per_page
        )
        before = (ledgers(cache), tree_dump(cache), cache.table(request, "lean").tolist())
        chunk = cache.next_chunk(request, LIMIT)
        state = (ledgers(cache), tree_dump(cache), cache.table(request, "lean").tolist())
        assert state == before, "asking for a chunk changed something"
        if chunk:
            server.step(request, chunk)
            cache.check_integrity()
            assert request.computed % page_size == 0 or request.computed == PROMPT
        else:
            assert free_pages == 0
            assert request.computed == start
        cache.abort(hog)
        while request.computed < PROMPT:
            server.step(request, cache.next_chunk(request, LIMIT))
        assert cache.finish(request) == PROMPT // page_size * page_size
        cache.check_integrity()
        return chunk
    finally:
        cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS_OF_LEAN))
@pytest.mark.parametrize(("page_size", "remaining", "fits"), REMAINING)
def test_a_continuing_chunk_takes_no_more_than_fits_and_is_deferred_when_nothing_does(
    name: str, page_size: int, remaining: int, fits: int
) -> None:
    assert continue_with_little_left(SETUPS_OF_LEAN[name], page_size, remaining, CHUNK) == fits


@pytest.mark.parametrize("name", sorted(SETUPS_OF_LEAN))
@pytest.mark.parametrize("page_size", [16, 64])
def test_a_chunk_that_starts_inside_a_page_ends_on_one(name: str, page_size: int) -> None:
    start = page_size // 2
    chunk = continue_with_little_left(SETUPS_OF_LEAN[name], page_size, page_size, start)
    assert (start + chunk) % page_size == 0


def _tokens_left(budget: Budget, request: Request) -> int:
    """The budget of the original bug: tokens of the pool, those that make no page included."""
    page_size = budget.tree.page_size
    lefts = []
    for part in request.components:
        component = part.component
        slots = component.device.headroom + part.account.promised
        lefts.append(slots // component.slots_per_page * page_size)
    return min(lefts) + 36 % page_size


class TakingAllThatRemains(Budget):
    """The field bug, first half: the chunk is all that remains, in tokens."""

    def fitting_chunk(self, request: Request, tokens: int) -> int:
        return min(tokens, _tokens_left(self, request))


class BypassedWhenEmpty(Budget):
    """The field bug, second half: with nothing left, the chunk limit alone counts."""

    def fitting_chunk(self, request: Request, tokens: int) -> int:
        return super().fitting_chunk(request, tokens) or tokens


@pytest.mark.parametrize("name", sorted(SETUPS_OF_LEAN))
@pytest.mark.parametrize(
    ("bug", "page_size", "remaining"),
    [
        (TakingAllThatRemains, 64, 100),
        (TakingAllThatRemains, 64, 36),
        (BypassedWhenEmpty, 64, 36),
        (BypassedWhenEmpty, 64, 0),
        (BypassedWhenEmpty, 1, 0),
    ],
)
def test_with_the_bug_the_allocation_of_the_chunk_fails(
    name: str, bug: type[Budget], page_size: int, remaining: int
) -> None:
    with pytest.raises(OutOfSlotsError, match="promised and refused"):
        continue_with_little_left(SETUPS_OF_LEAN[name], page_size, remaining, CHUNK, bug)


@pytest.mark.parametrize("name", sorted(SETUPS))
@pytest.mark.parametrize("page_size", [1, 4])
def test_budgeted_by_its_reach_a_request_gets_every_chunk_it_was_admitted_for(
    name: str, page_size: int
) -> None:
    cache = SETUPS[name].open(page_size=page_size, device_tokens=256, host_tokens=512)
    server = Server(cache)
    request = server.start(range(80), reserve=8, chunk=8)
    server.step(request, cache.next_chunk(request))
    n_others = 0
    while True:
        other = server.begin(range(1000 * n_others, 1000 * n_others + 8))
        if not cache.admit(other).admitted:
            cache.abort(other)
            break
        server.prefill(other)
        n_others += 1
    assert n_others
    server.prefill(request)
    server.decode(request, 8)
    cache.check_integrity()
    cache.close()
