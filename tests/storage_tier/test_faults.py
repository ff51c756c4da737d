"""With any faults of a store serving goes on, data is right and the books balance (S10)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from hypothesis import settings as examples

from kvgraft import WritePolicy
from kvgraft_storage import Access, BreakerState
from kvgraft_storage.settings import PrefetchPolicy, StorePolicy

from ..serving.own_parts import clocked_parts
from ..serving.setups import SETUPS, Setup, installed, one_of_each_kind
from .shelf import AT_ONCE, open_cache, settings, tier_of
from .troubles import DEADLINE_S, PROMPTS, VERBS, Clock, Traffic, Trouble, Troubled, traffic_over

HYBRID = installed("full", "swa", "mamba")
LARGE: dict[str, Any] = {"device_tokens": 256, "host_tokens": 512}
FRESH = [*range(1500, 1521)]

# expected counts, by fault of a verb
STORIES: dict[Trouble, Callable[[str], list[str]]] = {
    Trouble.HANGS: lambda verb: [f"{verb}.timeout", f"{verb}.timeouts", "workers.abandoned"],
    Trouble.RAISES: lambda verb: [f"{verb}.errors", f"{verb}.down"],
    Trouble.NONSENSE: lambda verb: [f"{verb}.errors", f"{verb}.down"],
    Trouble.LIES: lambda verb: {
        "exists": ["exists.miss", "set.known"],
        "get": ["get.corrupt"],
        "set": ["set.ok"],
    }[verb],
}


def failing(traffic: Traffic, verb: str, trouble: Trouble) -> Troubled:
    """Two prompts' data is in the store and nowhere else; then the store begins to fail."""
    for prompt in PROMPTS[:2]:
        traffic.serve(prompt)
    traffic.empty()
    assert isinstance(traffic.backend, Troubled)
    traffic.backend.faults[verb] = trouble
    return traffic.backend


@pytest.mark.parametrize("trouble", list(STORIES))
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_fails_costs_misses_until_the_store_is_back(
    verb: str, trouble: Trouble
) -> None:
    with traffic_over(HYBRID, settings(deadline_s=DEADLINE_S), Troubled, **LARGE) as traffic:
        failing(traffic, verb, trouble)
        gained = traffic.serve(PROMPTS[0])
        traffic.serve(FRESH)
        traffic.settle()
        traffic.check()
        assert traffic.served == 4
        assert bool(gained) == (verb == "set")
        counts = traffic.tier.counts()
        for name in STORIES[trouble](verb):
            assert counts.get(name), (name, counts)
        traffic.recover()
        traffic.finish()
        assert traffic.tier.client.n_abandoned == 0, "threads that hung came back"


@pytest.mark.parametrize("verb", VERBS)
def test_answers_that_come_as_the_deadline_passes_are_right_or_misses(verb: str) -> None:
    with traffic_over(HYBRID, settings(deadline_s=DEADLINE_S), Troubled, **LARGE) as traffic:
        failing(traffic, verb, Trouble.SLOW)
        for prompt in (PROMPTS[0], FRESH, PROMPTS[1]):
            traffic.serve(prompt)
            traffic.check()
        assert traffic.served == 5
        traffic.recover()
        traffic.finish()


@pytest.mark.parametrize("trouble", [Trouble.HANGS, Trouble.RAISES, Trouble.LIES])
def test_a_failed_store_is_left_alone_and_tried_now_and_then(
    trouble: Trouble,
) -> None:
    with traffic_over(HYBRID, settings(deadline_s=DEADLINE_S), Troubled, **LARGE) as traffic:
        backend = failing(traffic, "exists", Trouble.RAISES)
        backend.faults |= {"set": Trouble.RAISES, "healthy": trouble}
        storage = traffic.tier.client
        for start in range(0, 600, 100):
            traffic.serve([*range(start, start + 9)])
            traffic.settle()
        assert all(storage.state_of(access) is BreakerState.OPEN for access in Access)
        before = backend.n_calls.copy()
        for start in range(1000, 2000, 100):
            prefetch_reason = traffic.serve([*range(start, start + 9)])
            assert prefetch_reason == 0
        assert backend.n_calls == before
        traffic.clock.now += 61.0
        traffic.let_time_pass(lambda: traffic.tier.counts().get("breaker.trials"))
        traffic.let_time_pass(lambda: backend.n_calls["healthy"])
        assert traffic.tier.client.state in (BreakerState.OPEN, BreakerState.HALF_OPEN)
        assert backend.n_calls["exists"] == before["exists"]
        traffic.recover()
        traffic.finish()


def test_data_computed_while_a_store_was_down_is_stored_when_it_is_back() -> None:
    with traffic_over(HYBRID, settings(deadline_s=DEADLINE_S), Troubled, **LARGE) as traffic:
        failing(traffic, "set", Trouble.RAISES)
        traffic.serve(FRESH)
        traffic.settle()
        traffic.recover()
        traffic.empty()
        assert traffic.serve(FRESH) == len(FRESH) - 1
        traffic.finish()


@pytest.mark.parametrize("verb", [*VERBS, "close"])
def test_a_store_that_hangs_is_detached_in_time_and_another_takes_its_place(verb: str) -> None:
    with traffic_over(HYBRID, settings(deadline_s=DEADLINE_S), Troubled, **LARGE) as traffic:
        backend = failing(traffic, verb, Trouble.HANGS)
        prefetch = traffic.tier.prefetch(traffic.key(PROMPTS[0]))
        traffic.run(traffic.key(FRESH))
        traffic.let_time_pass(lambda: verb == "close" or backend.stuck)
        detached = traffic.tier.detach(2.0)
        traffic.let_time_pass(lambda: detached.done)
        assert detached.value is None
        assert prefetch.ended
        traffic.tier.cancel(prefetch)  # it may have come before the store hung, and be kept
        traffic.serve([*range(1600, 1620)])
        traffic.check()
        traffic.backend = Troubled(traffic.clock)
        traffic.tier.attach(traffic.backend)
        traffic.recover()
        backend.heal()
        traffic.finish()


def test_a_cache_closes_in_time_over_a_store_that_does_not() -> None:
    backend = Troubled(Clock())
    cache = open_cache(HYBRID, backend, timeout_s=0.3, **LARGE)
    backend.faults["close"] = Trouble.HANGS
    start = time.monotonic()
    cache.close()
    assert time.monotonic() - start < 30
    assert tier_of(cache).client.counters.snapshot()["close.timeouts"] == 1
    backend.heal()


def test_ancestors_of_data_on_its_way_to_a_store_are_not_promised() -> None:
    """A node with HOST data below it is no victim: it must not count as room (A7, A12)."""
    given = settings(deadline_s=DEADLINE_S)
    with traffic_over(
        SETUPS["hisparse"], given, Troubled, device_tokens=64, host_tokens=32
    ) as traffic:
        prompt = [*range(100, 112)]
        traffic.serve(prompt)
        traffic.settle()
        assert isinstance(traffic.backend, Troubled)
        traffic.backend.faults["set"] = Trouble.HANGS
        traffic.run(traffic.key([*prompt, 1, 2]))
        assert traffic.cache.journal.drain(60)
        traffic.cache.poll()
        traffic.run(traffic.key(range(1500, 1520)))
        traffic.check()


def test_time_that_leaps_while_calls_are_under_way_says_nothing_about_their_keys() -> None:
    """A machine that was suspended: earlier calls time out, and are made again (S7)."""
    with traffic_over(HYBRID, settings(deadline_s=DEADLINE_S), Troubled, **LARGE) as traffic:
        traffic.tier.pace = AT_ONCE
        backend = failing(traffic, "exists", Trouble.HANGS)
        prefetch = traffic.tier.prefetch(traffic.key(PROMPTS[0]))
        while not backend.stuck:
            traffic.cache.poll()
        traffic.clock.now += 8 * 3600
        traffic.cache.poll()
        assert prefetch.ended
        assert "did not answer in time" in prefetch.reason
        assert traffic.tier.counts()["exists.timeout"]
        backend.heal()
        traffic.run(prefetch.key, prefetch)
        traffic.empty()
        assert traffic.serve(PROMPTS[0]) == len(PROMPTS[0]) - 1
        traffic.recover()
        traffic.finish()


def test_a_wall_clock_that_jumps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for jumps in (False, True):
        clock = Clock()  # so that no run is long enough for stored data to be touched
        shelf, parts = Troubled(clock), clocked_parts(clock)
        cache = open_cache(HYBRID, shelf, settings(prefetch="wait-complete"), parts=parts, **LARGE)
        traffic = Traffic(cache, None, clock, random.Random(0))
        with monkeypatch.context() as patched:
            if jumps:
                patched.setattr(time, "time", lambda: random.uniform(-3e7, 3e7))
                patched.setattr(time, "time_ns", lambda: int(time.time() * 1e9))
            for prompt in [*PROMPTS, *PROMPTS]:
                traffic.serve(prompt)
                traffic.empty()
            traffic.finish()
            cache.close()
        counts.append(tier_of(cache).counts())
    assert counts[0] == counts[1]
    assert counts[0]["get.ok"]


STEPS = ("begin", "begin", "begin", "queue", "queue", "evict", "cancel", "poll")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("setup", one_of_each_kind())
@examples(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    store=st.sampled_from(StorePolicy),
    prefetch=st.sampled_from(PrefetchPolicy),
    write=st.sampled_from(WritePolicy),
    host_tokens=st.sampled_from([32, 128]),
    troubles=st.lists(
        st.tuples(
            st.sampled_from([*VERBS, "healthy"]), st.sampled_from(Trouble), st.integers(1, 12)
        ),
        max_size=4,
    ),
)
def test_any_traffic_over_any_trouble(
    setup: Setup,
    seed: int,
    store: StorePolicy,
    prefetch: PrefetchPolicy,
    write: WritePolicy,
    host_tokens: int,
    troubles: list[tuple[str, Trouble, int]],
) -> None:
    given = settings(store=store, prefetch=prefetch, prefetch_timeout_s=2.0, deadline_s=DEADLINE_S)
    sizes = {"policy": write, "device_tokens": 64, "host_tokens": host_tokens}
    with traffic_over(setup, given, Troubled, seed, **sizes) as traffic:
        backend = traffic.backend
        assert isinstance(backend, Troubled)
        for verb, trouble, n_steps in [("", None, 12), *troubles]:
            if trouble is not None:
                backend.faults[verb] = trouble
            for _ in range(n_steps):
                getattr(traffic, traffic.chance.choice(STEPS))()
                traffic.check()
            if traffic.chance.random() < 0.3:
                backend.heal()
        traffic.recover()
        traffic.finish()
