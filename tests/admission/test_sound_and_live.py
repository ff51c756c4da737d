"""Admitted requests get their slots; those that fit are admitted in the end (A7, A8, A12)."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import TokenKey, WritePolicy
from kvgraft.admission import Outcome
from kvgraft.cache import Cache
from kvgraft.requests.request import Request

from ..serving.engines import PromptEngine
from ..serving.setups import SETUPS, Setup
from .crowd import Crowd

randoms = st.randoms(use_true_random=False)


def crowd_of(setup: Setup, random: Random) -> Crowd:
    """A crowd in a cache in which only a few of them fit."""
    return Crowd(*_small(setup, random), random)


def _small(setup: Setup, random: Random) -> tuple[Cache, PromptEngine]:
    engine = PromptEngine()
    sizes: dict[str, Any] = {
        "mamba": {"states": random.choice([3, 6, 9])},
        "ssm": {"states": random.choice([3, 6, 9])},
        "hisparse": {"max_running": 3},
        "swa": {"device_tokens": random.choice([14, 20, 28])},
    }
    cache = setup.open(
        device_tokens=random.choice([20, 30, 44]),
        host_tokens=random.choice([24, 96, 96]),
        policy=random.choice(list(WritePolicy)),
        engine=engine,
        timeout_s=1e-3,
        **{name: size for name, size in sizes.items() if name in setup.options},
    )
    return cache, engine


@pytest.mark.parametrize("name", sorted(SETUPS))
@given(random=randoms)
@pytest.mark.rule("A2")
def test_an_admitted_request_gets_every_slot_beside_any_others(name: str, random: Random) -> None:
    crowd = crowd_of(SETUPS[name], random)
    for _ in range(random.randint(5, 60)):
        crowd.move()
    crowd.run_to_the_end()
    crowd.cache.check_integrity()


@pytest.mark.parametrize("name", sorted(SETUPS))
@given(random=randoms)
def test_a_deferred_request_is_admitted_once_the_others_have_finished(
    name: str, random: Random
) -> None:
    crowd = crowd_of(SETUPS[name], random)
    for _ in range(random.randint(5, 40)):
        crowd.move()
    waiting: list[Request] = crowd.leased
    crowd.run_to_the_end()
    while waiting:
        last = waiting.pop(random.randrange(len(waiting)))
        for other in waiting:
            # the others wait without a lease of their own
            crowd.cache.abort(other)
        waiting.clear()
        decision = crowd.cache.admit(last)
        if crowd.engine.pending:
            # its own lease, made anew, started a backup; once that has ended it holds nothing
            crowd.settle()
            decision = decision if decision.admitted else crowd.cache.admit(last)
        assert decision.outcome is not Outcome.DEFERRED, f"alone, and still {decision}"
        if decision.admitted:
            crowd.cache.load_back(last)
            crowd.running.append(last)
            crowd.run_to_the_end()


@pytest.mark.parametrize("name", sorted(SETUPS))
@given(random=randoms)
def test_a_busy_cache_and_an_empty_one_refuse_the_same_requests_for_ever(
    name: str, random: Random
) -> None:
    crowd = crowd_of(SETUPS[name], random)
    for _ in range(random.randint(5, 30)):
        crowd.move()
    prompt = [random.choice([7, 8])] * random.randint(1, 60)
    reserve, chunk = random.choice([0, 3, 20]), random.choice([None, 2, 6, 24])
    busy = crowd.cache.begin(TokenKey(prompt), reserve=reserve, chunk=chunk)
    answer = crowd.cache.admit(busy)
    empty_like = Cache(
        crowd.cache.config,
        plugins=list(SETUPS[name].plugins.values()),
        transfers=PromptEngine(),
    )
    alone = empty_like.begin(TokenKey(prompt), reserve=reserve, chunk=chunk)
    final = empty_like.admit(alone)
    assert final.outcome is not Outcome.DEFERRED
    assert (answer.outcome is Outcome.NEVER_FITS) == (final.outcome is Outcome.NEVER_FITS)
    if answer.outcome is Outcome.NEVER_FITS:
        assert answer.shortages
        for shortage in answer.shortages:
            assert str(shortage) in str(answer)
            assert shortage.component in str(answer)
            assert f"needs {shortage.needed} slots" in str(answer)
            assert re.search(rf"(the pool has|of) {shortage.capacity}\b", str(answer))
        assert any(each.needed > each.capacity for each in final.shortages)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", ["swa", "full+swa", "sinks", "full+chunked", "swa+ssm"])
@pytest.mark.parametrize("n_windows", [2, 3])
@pytest.mark.parametrize("start", ["new", "resumed"])
@pytest.mark.parametrize("chunk", [None, 2, 8])
def test_an_idle_pool_of_two_windows_is_not_starved(
    name: str, n_windows: int, start: str, chunk: int | None
) -> None:
    setup = SETUPS[name]
    narrow = next(each for each in setup.options if each not in ("full", "ssm"))
    probe = setup.open().tree.by_name[narrow]
    sizes: dict[str, Any] = {
        narrow: {"device_tokens": 2 * n_windows * probe.reach_pages.width(1000)}
    }
    cache = setup.open(device_tokens=256, host_tokens=512, **sizes)
    crowd = Crowd(cache, PromptEngine(), Random(0))
    server = crowd.server
    prompt = list(range(40))
    if start == "resumed":
        server.serve(prompt, chunk=2)
        server.empty_device()
    request = server.begin([*prompt, *range(900, 930)], reserve=4, chunk=chunk)
    decision = cache.admit(request)
    assert decision.admitted, decision
    server.load_back(request)
    server.prefill(request)
    server.decode(request, 4)
    cache.finish(request)
    cache.check_integrity()
    cache.close()


@given(random=randoms)
def test_a_later_admission_does_not_hurt_an_earlier_one(random: Random) -> None:
    crowd = crowd_of(SETUPS["full+swa+mamba"], random)
    cache, server = crowd.cache, crowd.server
    first = server.begin(range(500, 508), reserve=3, chunk=4)
    if not cache.admit(first).admitted:
        return
    cache.load_back(first)
    for _ in range(random.randint(5, 40)):
        crowd.move()
    crowd.settle()
    server.prefill(first)
    server.decode(first, 3)
    assert cache.finish(first) == 10
    cache.check_integrity()
