"""State slots are budgeted apart from token pages, copies on write included (A10, M8)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgraft.admission import Outcome
from kvgraft.cache import Cache
from kvgraft.requests.request import Request

from ..serving.components import StatePackage
from ..serving.server import Server
from ..serving.setups import SETUPS, mixed

PROMPT = list(range(100, 112))
SETS = [("full+mamba", "mamba"), ("swa+ssm", "ssm"), ("full+swa+mamba", "mamba")]


@pytest.mark.parametrize(("name", "state"), SETS)
@pytest.mark.parametrize("resume_from", ["device", "host"])
def test_with_any_number_of_states_an_admitted_request_can_copy_and_capture(
    name: str, state: str, resume_from: str
) -> None:
    answers = []
    for states in range(1, 9):
        sizes: dict[str, Any] = {state: {"states": states}}
        cache = SETUPS[name].open(**sizes)
        server = Server(cache)
        first = server.begin(PROMPT)
        assert cache.admit(first).admitted
        server.prefill(first)
        cache.finish(first)
        cache.drain()
        if resume_from == "host":
            server.empty_device()
        request = server.begin([*PROMPT, *range(20)], reserve=5, chunk=6)
        decision = cache.admit(request)
        if decision.admitted:
            copies = cache.states.copies_on_write
            server.load_back(request)
            server.prefill(request)
            server.decode(request, 5)
            assert cache.states.copies_on_write - copies == bool(request.anchor_tokens)
            keeps, cached = request.keeps_decoded, cache.finish(request)
            assert cached == 36 or not keeps, "a state that was promised was not captured"
            answers.append((states, "resumed" if request.anchor_tokens else "as a miss"))
        cache.check_integrity()
        cache.close()
    assert len(answers) == 8, "it fits with one state"
    assert answers[0][1] == "as a miss"
    assert answers[-1][1] == "resumed"
    assert "as a miss" in {answer for _, answer in answers}


@pytest.mark.parametrize(("name", "state"), SETS)
def test_short_of_states_only_the_state_pool_is_named(name: str, state: str) -> None:
    sizes: dict[str, Any] = {state: {"states": 6}}
    cache = SETUPS[name].open(device_tokens=512, host_tokens=512, **sizes)
    server = Server(cache)
    running: list[Request] = []
    while True:
        request = server.begin(range(1000 * len(running), 1000 * len(running) + 6))
        decision = cache.admit(request)
        if not decision.admitted:
            break
        running.append(request)
    assert decision.outcome is Outcome.DEFERRED
    assert [each.component for each in decision.shortages] == [state]
    assert f"component '{state}' device pool" in str(decision)
    for each in running:
        server.prefill(each)
        cache.finish(each)
    assert cache.drain()
    assert cache.admit(request).admitted
    cache.close()


def test_a_state_in_use_is_never_written_by_a_request_that_resumes_from_it() -> None:
    cache = SETUPS["full+mamba"].open()
    server = Server(cache)
    server.serve(PROMPT)
    together = [server.start([*PROMPT, n, n]) for n in (1, 2, 3)]
    for request in together:
        server.prefill(request)
    slots = {cache.state_slot(request, "mamba") for request in together}
    assert len(slots) == 3
    late = server.start([*PROMPT, 4, 4])
    server.prefill(late)
    assert late.anchor_tokens == len(PROMPT)
    cache.close()


def test_a_state_that_cannot_be_copied_is_not_resumed_from() -> None:
    setup = mixed(("full",), StatePackage("uncopied", can_copy=False))
    cache = setup.open()
    server = Server(cache)
    server.serve(PROMPT)
    request = server.start([*PROMPT, 1, 2])
    assert request.anchor_tokens == 0
    assert request.limited is not None
    assert "M8" in request.limited
    server.prefill(request)
    cache.check_integrity()
    cache.close()


@pytest.mark.parametrize(("name", "state"), SETS)
@pytest.mark.parametrize("end", [Cache.finish, Cache.retract, Cache.abort])
def test_a_request_that_ends_before_its_next_step_leaves_no_state_behind_twice(
    name: str, state: str, end: Callable[[Cache, Request], object]
) -> None:
    """Slots for a step are there, and the state before it is copied; the step never runs."""
    sizes: dict[str, Any] = {state: {"states": 6}}
    with SETUPS[name].open(device_tokens=128, **sizes) as cache:
        server = Server(cache)
        request = server.start(range(100, 117))
        (boundary,) = request.checkpoints
        server.step(request, 2 * boundary)
        assert cache.allocate(request, 1)
        end(cache, request)
        cache.check_integrity()
        ledger = cache.tree.component(state).device
        kept = end is not Cache.abort
        assert (ledger.private, ledger.promised) == (0, 0)
        assert ledger.free + kept == ledger.capacity
        again = server.begin(range(100, 117))
        assert again.anchor_tokens == kept * 2 * boundary


@pytest.mark.parametrize("name", [name for name, _ in SETS])
def test_a_request_that_decodes_nothing_asks_for_no_state_of_a_decode(name: str) -> None:
    """It needs its own state, and one at the boundary that a repetition resumes from."""
    state = dict(SETS)[name]
    sizes: dict[str, Any] = {state: {"states": 2}}
    with SETUPS[name].open(device_tokens=128, **sizes) as cache:
        server = Server(cache)
        request = server.start(range(100, 105))
        (boundary,) = request.checkpoints
        server.prefill(request)
        cache.finish(request)
        assert not any(cache.points.skipped.values())
        again = server.begin(range(100, 105))
        assert again.anchor_tokens == boundary * cache.config.page_size
