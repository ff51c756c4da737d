"""Tracers are told every step of a request once, and cost the cache nothing when they fail."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from kvgraft import ConfigError, GuardMode, Tier, TokenKey
from kvgraft.admission import Decision
from kvgraft.cache import Cache
from kvgraft.parts import Prefetch
from kvgraft.requests.request import Request
from kvgraft_observe.tracing import Tracer
from kvgraft_storage.settings import PrefetchPolicy

from ..serving.server import Server
from ..serving.setups import installed
from ..storage_tier.shelf import drained, open_cache, settings, stocked, tier_of

PROMPT = list(range(100, 133))


class Diary(Tracer):
    """Writes down the steps, and what they are about."""

    def __init__(self) -> None:
        self.steps: list[tuple[Any, ...]] = []

    def beginning(self, key: TokenKey) -> None:
        self.steps.append(("beginning", key))

    def begun(self, request: Request) -> None:
        self.steps.append(("begun", request.anchor_tokens))

    def decided(self, request: Request, decision: Decision) -> None:
        self.steps.append(("decided", decision.admitted))

    def loading(self, request: Request) -> None:
        self.steps.append(("loading", len(request.waits)))

    def finished(self, request: Request) -> None:
        self.steps.append(("finished", request.computed))

    def aborted(self, request: Request) -> None:
        self.steps.append(("aborted", request.computed))

    def prefetching(self, prefetch: Prefetch) -> None:
        self.steps.append(("prefetching", prefetch.key))

    def polled(self) -> None:
        self.steps.append(("polled",))


@pytest.mark.parametrize("guard", [GuardMode.OFF, GuardMode.ON])
def test_a_life_is_reported_step_by_step(guard: GuardMode) -> None:
    with installed("full").open(device_tokens=48, host_tokens=64, guard=guard) as cache:
        diary, server = Diary(), Server(cache)
        server.serve(PROMPT[:20])
        cache.drain()
        cache.evict("full", 20)
        cache.add_tracer(diary)
        key = TokenKey(PROMPT[:20])
        request = cache.begin(key)
        assert cache.admit(request).admitted
        server.load_back(request)
        server.step(request, request.prompt - request.computed)
        cache.finish(request)
        other = cache.begin(key)
        cache.restart(other)
        cache.abort(other)
        found = request.anchor_tokens
        assert found > 0
        assert diary.steps == [
            ("beginning", key),
            ("begun", found),
            ("decided", True),
            ("loading", 1),
            ("polled",),
            ("finished", 20),
            *[("beginning", key), ("begun", found)] * 2,
            ("aborted", found),
        ]
        cache.remove_tracer(diary)
        cache.abort(cache.begin(key))
        assert len(diary.steps) == 11


def test_a_deferred_request_and_one_whose_load_back_has_nothing_to_do() -> None:
    with installed("full").open(device_tokens=32, host_tokens=0) as cache:
        diary = Diary()
        cache.add_tracer(diary)
        first, second = (cache.begin(TokenKey([start] * 17)) for start in (1, 2))
        assert cache.admit(first).admitted
        assert not cache.load_back(first)
        assert not cache.admit(second).admitted
        told = [step for step in diary.steps if step[0] in ("decided", "loading")]
        assert told == [("decided", True), ("decided", False)]


def test_a_prefetch_is_reported_and_polled_for() -> None:
    setup = installed("full")
    shelf = stocked(setup, PROMPT)
    given = settings(prefetch=PrefetchPolicy.WAIT_COMPLETE)
    with open_cache(setup, shelf, given, device_tokens=256, host_tokens=512) as cache:
        diary, key = Diary(), TokenKey(PROMPT)
        cache.add_tracer(diary)
        drained(cache, tier_of(cache).prefetch(key))
        assert diary.steps[0] == ("prefetching", key)
        assert ("polled",) in diary.steps
        cache.remove_tracer(diary)
        tier_of(cache).prefetch(TokenKey([5] * 40))
        assert [step[0] for step in diary.steps].count("prefetching") == 1


def test_a_tracer_that_raises_is_let_go_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Bad(Diary):
        def begun(self, request: Request) -> None:
            raise RuntimeError("no\nspan")

    bad, good = Bad(), Diary()
    with installed("full").open() as cache, caplog.at_level(logging.WARNING, "kvgraft"):
        cache.add_tracer(bad)
        cache.add_tracer(good)
        Server(cache).serve(PROMPT)
        assert "RuntimeError: no span" in caplog.text
        assert [step[0] for step in bad.steps] == ["beginning"]
        told = [step[0] for step in good.steps if step != ("polled",)]
        assert told == ["beginning", "begun", "decided", "finished"]
        cache.check_integrity()


def test_a_tracer_that_is_added_twice_is_notified_once_and_what_is_none_is_refused() -> None:
    diary = Diary()
    with installed("full").open() as cache:
        cache.add_tracer(diary)
        cache.add_tracer(diary)
        cache.poll()
        assert diary.steps == [("polled",)]
        cache.remove_tracer(Diary())
        with pytest.raises(ConfigError, match=r"add_tracer: \[\] is no tracer; derive"):
            cache.add_tracer([])


def test_a_tracer_may_ask_why_while_it_is_notified() -> None:
    reasons: list[str] = []

    class Asking(Tracer):
        def __init__(self, cache: Cache) -> None:
            self.cache = cache

        def decided(self, request: Request, decision: Decision) -> None:
            reasons.append(self.cache.explain(request.key).components[0].reason)

    with installed("full").open(guard=GuardMode.ON) as cache:
        cache.add_tracer(Asking(cache))
        Server(cache).serve(PROMPT)
        cache.evict("full", 400, Tier.HOST)
        Server(cache).serve(PROMPT)
        cache.check_integrity()
    assert reasons == [
        "the tree holds no node beyond 0",
        "nothing deeper may be matched; fewer tokens follow, 1, than a page of 2 has",
    ]
