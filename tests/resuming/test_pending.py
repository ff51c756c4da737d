"""A request waits for pages that another computes, a bounded number of times (A8)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest

from kvgraft import Cache, ConfigError, GuardMode, Outcome, Request, TokenKey
from kvgraft.admission import Decision

from ..serving.server import Server
from ..serving.setups import Setup, installed

PAGE = 2
DOCUMENT = list(range(100, 120))
SETUPS = {
    "+".join(names): installed(*names)
    for names in (("full",), ("full", "swa"), ("full", "mamba"), ("swa",), ("full", "swa", "mamba"))
}
each_setup = pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)


def opened(setup: Setup = SETUPS["full"], **options: object) -> Server:
    given: dict[str, object] = {"device_tokens": 256, "guard": GuardMode.ON, **options}
    return Server(setup.open(page_size=PAGE, **given))  # type: ignore[arg-type]


def begin(
    server: Server,
    tokens: Sequence[int],
    max_deferrals: int = 0,
    *,
    namespace: object = None,
    chunk: int = 4,
) -> Request:
    key = TokenKey(tokens, namespace)
    return server.cache.begin(key, chunk=chunk, max_deferrals=max_deferrals)


def running(server: Server, tokens: Sequence[int] = (*DOCUMENT, 1, 2)) -> Request:
    request = begin(server, tokens)
    assert server.cache.admit(request).admitted
    return request


def step(server: Server, request: Request) -> None:
    """A chunk, shared at once."""
    server.step(request, server.cache.next_chunk(request))
    server.cache.checkpoint(request)


def deferred(decision: Decision) -> bool:
    return decision.outcome is Outcome.DEFERRED and decision.pending is not None


@each_setup
@pytest.mark.parametrize("tail", [1, 2, 5])
def test_a_wave_computes_its_document_once(setup: Setup, tail: int) -> None:
    """Also where the leader had no resume point at the document's end."""
    server = opened(setup)
    cache = server.cache
    wave = [begin(server, [*DOCUMENT, *[n] * tail], max_deferrals=50) for n in range(4)]
    decisions = [cache.admit(each) for each in wave]
    assert decisions[0].admitted
    assert all(map(deferred, decisions[1:]))
    for decision in decisions[1:]:
        assert decision.pending == (len(DOCUMENT), 0, wave[0])
    going, rounds = [wave[0]], 0
    while cache.requests:
        rounds += 1
        for each in list(going):
            if each.computed < each.prompt:
                step(server, each)
            else:
                cache.finish(each)
                going.remove(each)
        going += [
            each for each in wave if each.stage.value == "leased" and cache.admit(each).admitted
        ]
    assert [each.anchor_tokens for each in wave] == [0, *[len(DOCUMENT)] * 3]
    assert cache.publisher.tokens == len(DOCUMENT) + 4 * tail
    assert rounds < 50
    cache.check_integrity()
    cache.close()


@each_setup
def test_the_same_prompt_several_times_is_computed_once(setup: Setup) -> None:
    server = opened(setup)
    first = running(server, DOCUMENT)
    others = [begin(server, DOCUMENT, max_deferrals=50) for _ in range(3)]
    assert all(deferred(server.cache.admit(each)) for each in others)
    while first.computed < first.prompt:
        step(server, first)
    for each in others:
        assert server.cache.admit(each).admitted
        server.prefill(each)
        server.cache.finish(each)
    assert server.cache.publisher.tokens == len(DOCUMENT) + 3 * PAGE
    server.cache.abort(first)
    server.cache.close()


def test_pending_pages_say_whose_they_are_and_how_far_they_go() -> None:
    server = opened()
    first = running(server)
    other = begin(server, [*DOCUMENT, 7])
    assert other.pending == (20, 0, first)
    step(server, first)
    assert other.pending == (20, 4, first)
    assert str(other.pending) == "20 tokens that another request computes, 4 so far"
    assert first.pending is None
    decision = server.cache.admit(other)
    assert decision.admitted  # it was begun without deferrals
    server.cache.abort(other)
    waiting = begin(server, [*DOCUMENT, 7], max_deferrals=1)
    said = "deferred; waits for 20 tokens that another request computes, 4 so far"
    assert str(server.cache.admit(waiting)) == said
    assert waiting.deferrals_left == 0
    step(server, first)
    while first.computed < 20:
        step(server, first)
    assert waiting.pending is None  # it is shared already


def test_of_several_the_deepest_then_the_furthest_then_the_oldest_is_named() -> None:
    server = opened()
    short = running(server, DOCUMENT[:10])
    assert begin(server, DOCUMENT).pending == (10, 0, short)
    deep, twin = running(server, [*DOCUMENT, 1]), running(server, [*DOCUMENT, 2])
    assert begin(server, DOCUMENT).pending == (18, 0, deep)  # a token is left to compute
    step(server, twin)
    assert begin(server, DOCUMENT).pending == (18, 4, twin)


@each_setup
@pytest.mark.parametrize("end", ["finish", "retract", "abort", "restart"])
def test_a_waiting_request_goes_on_when_the_other_ends(setup: Setup, end: str) -> None:
    server = opened(setup)
    cache = server.cache
    first = running(server)
    other = begin(server, [*DOCUMENT, 7, 7], max_deferrals=50)
    assert deferred(cache.admit(other))
    for _ in range(3):
        step(server, first)
    assert deferred(cache.admit(other))
    getattr(cache, end)(first)
    assert cache.admit(other).admitted
    if setup is SETUPS["full"]:
        assert other.anchor_tokens == 12  # it matched again
    assert other.deferrals_left == 48
    server.prefill(other)
    cache.finish(other)
    cache.check_integrity()


def test_a_stalled_request_is_waited_for_as_often_as_was_said() -> None:
    server = opened()
    running(server)
    other = begin(server, [*DOCUMENT, 7], max_deferrals=3)
    assert [deferred(server.cache.admit(other)) for _ in range(3)] == [True] * 3
    assert server.cache.admit(other).admitted
    assert other.computed == 0


def test_nobody_waits_for_one_that_waits() -> None:
    server = opened()
    waiting = begin(server, DOCUMENT, max_deferrals=5)
    other = begin(server, DOCUMENT, max_deferrals=5)
    assert other.pending is None
    assert server.cache.admit(other).admitted
    assert deferred(server.cache.admit(waiting))


def test_another_namespace_another_cache_or_a_cut_key_is_not_waited_for() -> None:
    server, elsewhere = opened(), opened()
    running(elsewhere)
    running(server)
    assert begin(server, DOCUMENT, namespace="tenant").pending is None
    cut = running(server, list(range(20)))
    assert begin(server, range(30)).pending == (20, 0, cut)
    cut.key.truncate(10)
    assert begin(server, range(30)).pending is None


def test_a_request_that_never_fits_is_rejected_at_once() -> None:
    server = opened()
    running(server)
    large = server.cache.begin(TokenKey(DOCUMENT), reserve=1000, max_deferrals=9)
    assert server.cache.admit(large).outcome is Outcome.NEVER_FITS
    assert large.deferrals_left == 9


def test_for_want_of_room_a_request_waits_as_it_always_did() -> None:
    server = opened(device_tokens=32)
    running(server)
    other = begin(server, [*DOCUMENT, 7], max_deferrals=9)
    decision = server.cache.admit(other)
    assert decision.outcome is Outcome.DEFERRED
    assert decision.pending is None
    assert decision.waits_for is not None
    assert decision.shortages
    assert other.deferrals_left == 9


def states_of(request: Request) -> int:
    demand = request.state_components[0].demand
    return demand.now + demand.later


def test_without_a_state_to_spare_the_point_before_is_waited_for() -> None:
    """One that waits could still be admitted, or the point would cost it more than it saves."""
    states, spare = 64, 0
    for expected in (16, 8, 16):
        server = opened(SETUPS["full+mamba"], mamba={"states": states + spare})
        first = server.cache.begin(TokenKey([*DOCUMENT, 1, 2]), chunk=4, resume_at=8)
        assert server.cache.admit(first).admitted
        before = first.state_components[0].account.promised
        other = begin(server, [*DOCUMENT[:16], 7], max_deferrals=9)
        assert server.cache.admit(other).pending == (expected, 0, first)
        assert first.state_components[0].account.promised == before + (expected == 16)
        spare = int(states < 64)
        states = states_of(first) + states_of(other)
        server.cache.check_integrity()


def test_a_cut_that_costs_more_than_it_saves_is_not_asked_for() -> None:
    setup = SETUPS["full+mamba"]
    for cut_tokens, cuts in ((16, [16]), (18, [])):
        cache = Cache.open(setup.options, page_size=PAGE, device_tokens=256, cut_tokens=cut_tokens)
        first = cache.begin(TokenKey(range(60)))
        assert cache.admit(first).admitted
        before = list(first.checkpoints)
        other = cache.begin(TokenKey([*range(16), 7, 7]), max_deferrals=3)
        assert deferred(cache.admit(other)) is bool(cuts)
        assert [page * PAGE for page in first.checkpoints if page not in before] == cuts
        cache.check_integrity()
        cache.close()


@pytest.mark.parametrize("max_deferrals", [-1, 0.5, None, "4"])
def test_max_deferrals_is_a_whole_number(max_deferrals: object) -> None:
    server = opened()
    with pytest.raises(ConfigError, match="begin: max_deferrals"):
        server.cache.begin(TokenKey(DOCUMENT), max_deferrals=max_deferrals)  # type: ignore[arg-type]


def test_a_request_does_not_keep_its_cache() -> None:
    cache = Cache.open(["full"], page_size=PAGE, device_tokens=64)
    request = cache.begin(TokenKey(DOCUMENT))
    cache.close()
    gone = weakref.ref(cache)
    del cache
    gc.collect()
    assert gone() is None
    assert request.pending is None
