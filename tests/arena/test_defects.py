"""One line wrong in what moves memory, and a guarded cache says so, or its data is lost (K7)."""

from __future__ import annotations

import pytest

from kvgraft import Cache, TokenKey
from kvgraft.errors import ContractViolation
from kvgraft.requests.request import Request
from kvgraft_testing.stepped import SteppedTransferEngine

from ..mutants.cores_of_budgets import BUDGET_DEFECTS
from .pools import PAGE, arena_of, opened, prefilled

TRUNK = 6 * PAGE


def stamped(cache: Cache, first: int, n_pages: int) -> Request:
    """A request whose pages and state hold its own number."""
    request = prefilled(cache, first, n_pages * PAGE)
    for plane in cache.mounted[0].component.device.planes:
        plane[cache.table(request, "full").tolist()] = first % 200 + 1
    plane = cache.mounted[1].component.device.planes[0]
    plane[cache.state_slot(request, "mamba")] = first % 200 + 1
    return request


def expect_stamps(cache: Cache, request: Request, first: int) -> None:
    for plane in cache.mounted[0].component.device.planes:
        rows = plane[cache.table(request, "full").tolist()]
        assert float(rows.min()) == float(rows.max()) == first % 200 + 1
    state = cache.mounted[1].component.device.planes[0][cache.state_slot(request, "mamba")]
    assert float(state.min()) == first % 200 + 1


def squeeze(cache: Cache, giver: str, taker: str) -> None:
    """Move all that can move, with nothing in flight: none of it waits."""
    while cache.move_memory(giver, taker):
        cache.check_integrity()
        assert not arena_of(cache).is_pending


def everything_moves() -> None:
    """Pages and states of the tree and of requests leave the end of either pool."""
    cache = opened(device_tokens=480 * PAGE, guard_full_check=1)
    full, mamba = arena_of(cache).pools
    for _ in range(16):
        assert cache.move_memory("full", "mamba")
    low = [stamped(cache, first, 12) for first in range(0, 14_000, 1000)]
    high = [stamped(cache, first, 12) for first in range(20_000, 27_000, 1000)]
    shared = high.pop()
    assert cache.checkpoint(shared)
    cache.finish(prefilled(cache, 50_000, TRUNK + 10 * PAGE))
    branch = cache.begin(TokenKey([*range(50_000, 50_000 + TRUNK), *range(9 * PAGE)]))
    assert cache.admit(branch).admitted
    assert cache.allocate(branch, branch.prompt)
    cache.computed(branch, branch.prompt)
    assert cache.checkpoint(branch), "it splits the node of the other at the trunk's end"
    for request in low:
        cache.abort(request)
    cache.check_integrity()
    for giver, taker in ((full, mamba), (mamba, full), (full, mamba)):
        squeeze(cache, giver.component.name, taker.component.name)
        for at, request in enumerate(high):
            expect_stamps(cache, request, 20_000 + 1000 * at)
        expect_stamps(cache, shared, 26_000)
    for each in (*high, shared, branch):
        cache.abort(each)
    cache.close()


def transfers_wait() -> None:
    """Slots that a copy reads stay; their extent costs headroom until it has gone."""
    engine = SteppedTransferEngine()
    cache = opened(
        engine=engine,
        device_tokens=480 * PAGE,
        host_tokens=900 * PAGE,
        write_policy="write-through",
        guard_full_check=1,
    )
    full = arena_of(cache).by_name["full"]
    below = prefilled(cache, 0, 200 * PAGE)
    cache.finish(prefilled(cache, 10_000, (full.allocator.end - 202) * PAGE))
    cache.abort(below)
    assert cache.move_memory("full", "mamba")
    cache.check_integrity()
    assert arena_of(cache).is_pending
    request = cache.begin(TokenKey(range(50_000, 50_000 + full.ledger.headroom * PAGE - PAGE)))
    assert cache.admit(request).admitted
    late = cache.begin(TokenKey(range(60_000, 60_000 + 4 * PAGE)))
    assert not cache.admit(late).admitted
    cache.abort(late)
    assert cache.allocate(request, request.prompt)
    cache.check_integrity()
    while engine.pending:
        engine.step()
        cache.poll()
        cache.check_integrity()
    assert not arena_of(cache).is_pending
    cache.abort(request)
    cache.close()


def a_decode_moves() -> None:
    """The last state that a decode kept leaves the end of its pool with the live one."""
    cache = opened(device_tokens=480 * PAGE, decode_interval_tokens=0, guard_full_check=1)
    for _ in range(4):
        assert cache.move_memory("full", "mamba")
    before = [prefilled(cache, first, PAGE) for first in range(0, 14_000, 1000)]
    decode = prefilled(cache, 20_000, PAGE, reserve=3 * PAGE)
    for token in range(PAGE + 1):
        decode.key.extend([token])
        assert cache.allocate(decode, 1)
        cache.computed(decode, 1)
    for request in before:
        cache.abort(request)
    squeeze(cache, "mamba", "full")
    assert cache.finish(decode) == 2 * PAGE
    cache.close()


SCENES = (everything_moves, transfers_wait, a_decode_moves)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_without_a_defect_nothing_is_wrong(scene: object) -> None:
    assert callable(scene)
    scene()


@pytest.mark.one_in(9)
@pytest.mark.plain_build
@pytest.mark.parametrize("name", BUDGET_DEFECTS)
def test_a_defect_shows(name: str) -> None:
    rules, put_in = BUDGET_DEFECTS[name]
    found = []
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch)
        for scene in SCENES:
            try:
                scene()
            except ContractViolation as violation:
                found.append(violation.rule)
            except AssertionError:
                found.append("K7")
    assert found
    assert {*found} <= {*rules, "K7"}, found
