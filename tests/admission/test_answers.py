"""Admission's answers, and its traces after a refusal (A6, A8, A9, A11)."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Cache, TokenKey
from kvgraft.admission import Outcome
from kvgraft.admission.decision import Waiting

from ..counting import lines_run
from ..serving.engines import PromptEngine
from ..serving.server import Server, ledgers, tree_dump
from ..serving.setups import SETUPS
from .test_sound_and_live import crowd_of

PROMPT = list(range(100, 112))


@pytest.mark.parametrize("name", sorted(SETUPS))
@given(random=st.randoms(use_true_random=False))
def test_a_rejected_request_leaves_no_trace(name: str, random: Random) -> None:
    crowd = crowd_of(SETUPS[name], random)
    for _ in range(random.randint(5, 30)):
        crowd.move()
    cache = crowd.cache
    crowd.settle()
    before = ledgers(cache), tree_dump(cache)
    request = crowd.server.begin(crowd.tokens(), reserve=random.choice([0, 9, 90]))
    leased = ledgers(cache), tree_dump(cache), request.anchor_tokens
    decision = cache.admit(request)
    if decision.outcome is Outcome.DEFERRED and request.limited is None:
        if request.anchor_tokens == leased[2]:
            assert (ledgers(cache), tree_dump(cache), leased[2]) == leased
        assert cache.admit(request) == decision
    if not decision.admitted:
        assert decision.shortages
        assert not any(part.account.promised for part in request.components)
    cache.abort(request)
    if not crowd.engine.pending:
        assert (ledgers(cache), tree_dump(cache)) == before
    cache.check_integrity()


def lines_to_defer(n_running: int, n_leased: int) -> int:
    """Lines that a request's deferral takes beside so many others."""
    with Cache.open({"full": {}}, device_tokens=64_000, page_size=1, payload=False) as cache:
        others = [cache.begin(TokenKey([1, n])) for n in range(n_running + n_leased)]
        for each in others[:n_running]:
            assert cache.admit(each).admitted
        request = cache.begin(TokenKey(range(63_990)))
        decision = cache.admit(request)  # the second one imports nothing
        lines = lines_run(lambda: cache.admit(request))
        assert decision.outcome is Outcome.DEFERRED
        assert decision.waits_for == Waiting(n_running, n_leased, 0, 0)
        return lines


def test_a_deferral_takes_no_step_for_each_running_or_waiting_request() -> None:
    assert lines_to_defer(10, 5) == lines_to_defer(40, 20)


WINDOWED = {
    "swa": "swa",
    "full+swa": "swa",
    "sinks": "sinks",
    "full+sinks": "sinks",
    "full+chunked": "chunked",
    "full+quartered+ssm": "quartered",
    "hisparse+sinks": "sinks",
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_chunk_shrinks_only_when_the_full_one_could_never_fit(name: str, page_size: int) -> None:
    """Over all chunks and a few pool sizes: shrunk chunks are aligned, not empty, and needed."""
    seen = set()
    for pages in (6, 9, 12, 15):
        sizes: dict[str, Any] = {WINDOWED[name]: {"device_tokens": pages * page_size}}
        cache = SETUPS[name].open(page_size=page_size, device_tokens=256, host_tokens=256, **sizes)
        server = Server(cache)
        for chunk in (1, 2, 3, 4, 6, 9, 14, 22, 39):
            request = server.begin(range(100 * chunk, 100 * chunk + 40), chunk=chunk)
            decision = cache.admit(request)
            given = request.chunk
            if not decision.admitted:
                seen.add("never")
                assert decision.outcome is Outcome.NEVER_FITS
                assert given == chunk
                cache.abort(request)
                continue
            server.prefill(request)
            cache.abort(request)
            seen.add("shrunk" if given < chunk else "whole")
            if given < chunk:
                assert given >= page_size
                assert given % page_size == 0
                larger = server.begin(range(20_000, 20_040), chunk=given + 1)
                assert cache.admit(larger).admitted
                assert larger.chunk == given
                cache.abort(larger)
        cache.check_integrity()
        cache.close()
    assert {"whole", "shrunk"} <= seen


def test_a_chunk_that_only_has_to_wait_does_not_shrink() -> None:
    cache = SETUPS["full+swa"].open(swa={"device_tokens": 40})
    server = Server(cache)
    other = server.start(range(30))
    assert cache.allocate(other, 30)
    request = server.begin(range(500, 530), chunk=26)
    assert cache.admit(request).outcome is Outcome.DEFERRED
    assert request.chunk == 26
    cache.abort(other)
    assert cache.admit(request).admitted
    assert request.chunk == 26
    cache.close()


def test_the_pool_that_never_fits_is_named_with_its_numbers() -> None:
    cache = SETUPS["full+swa"].open(device_tokens=40, swa={"device_tokens": 64})
    request = Server(cache).begin(range(60), reserve=4)
    decision = cache.admit(request)
    assert str(decision) == (
        "never fits; component 'full' device pool: needs 33 slots, the pool has 20"
    )
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_a_batch_demands_the_sum_of_its_requests_and_counts_shared_slots_once(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=256, host_tokens=256)
    server = Server(cache)
    server.serve(PROMPT)
    batch = [server.begin([*PROMPT, *range(n, n + 6)], reserve=4, chunk=4) for n in (1, 20, 40)]
    for component in cache.tree.components:
        shared = {
            id(node): len(node.cells[component.index].device or b"") // 4
            for node in cache.tree.nodes()
            if node.cells[component.index].device_pins
        }
        assert component.device.pinned == sum(shared.values()), "the shared prefix is pinned once"
    sums = [0] * len(cache.tree.components)
    for request in batch:
        assert cache.admit(request).admitted
        for part in request.components:
            component, demand = part.component, part.demand
            sums[component.index] += demand.now + demand.later
            assert component.device.promised == sums[component.index]
    for request in batch:
        cache.abort(request)
    assert all(component.device.promised == 0 for component in cache.tree.components)
    cache.close()


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_requests_that_load_the_same_pages_are_promised_them_once(name: str) -> None:
    cache = SETUPS[name].open(device_tokens=256, host_tokens=256)
    server = Server(cache)
    server.serve(PROMPT)
    server.empty_device()
    first = server.begin([*PROMPT, 1, 2])
    second = server.begin([*PROMPT, 3, 4])
    assert first.needs_load_back
    loads = [part.host_slots for part in first.components]
    assert [part.host_slots for part in second.components] == loads
    components = cache.tree.components
    assert cache.admit(first).admitted
    alone = [component.device.promised for component in components]
    assert cache.admit(second).admitted
    cache.load_back(first)
    cache.load_back(second)
    # the second's promise is the first's less the pages that the first brings
    for component, promised, load in zip(components, alone, loads):
        assert component.device.promised == 2 * (promised - load)
    third = server.begin([*PROMPT, 5, 6])
    if not third.ready:
        assert not third.needs_load_back, "data on its way is not demanded again"
    cache.drain()
    for request in (first, second):
        assert request.ready
        server.prefill(request)
    cache.check_integrity()
    cache.close()


def test_a_prefix_on_its_way_counts_as_one_that_is_there() -> None:
    """A request that never fits beside its own prefix is told so before the prefix arrives."""
    engine = PromptEngine()
    with SETUPS["full"].open(device_tokens=40, host_tokens=64, engine=engine) as cache:
        server = Server(cache)
        server.serve(PROMPT)
        server.empty_device()
        loading = server.begin([*PROMPT, 1, 2])
        assert cache.admit(loading).admitted
        cache.load_back(loading)
        large = server.begin([*PROMPT, *range(200, 228)])
        before = cache.admit(large)
        assert large.limited is None
        assert before.outcome is Outcome.NEVER_FITS
        engine.run_all()
        cache.poll()
        assert loading.ready
        assert cache.admit(large).outcome is before.outcome


@pytest.mark.parametrize("rows", [1, 2])
def test_the_last_private_row_is_given(rows: int) -> None:
    with SETUPS["hisparse"].open(hisparse={"max_running": rows}) as cache:
        server = Server(cache)
        running = [server.start(range(100 * n, 100 * n + 4)) for n in range(rows)]
        waiting = server.begin(range(900, 904))
        assert cache.admit(waiting).outcome is Outcome.DEFERRED
        cache.abort(running.pop())
        assert cache.admit(waiting).admitted
