"""Priorities and times to live decide before any policy, and cost nothing until they are given."""

from __future__ import annotations

import random
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from kvgraft import BudgetError, CacheConfig, ConfigError, GuardMode, TokenKey
from kvgraft.cache import Cache
from kvgraft.policies.recency import RecencyQueue
from kvgraft.requests.request import Request
from kvgraft.types import Tier

from ..serving import life

POLICIES = ("lru", "density")


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def opened(policy: str = "lru", clock: Time | None = None, **settings: Any) -> Cache:
    given = {"device_tokens": 64, "host_tokens": 128, **settings}
    config = CacheConfig(
        components={"full": {}},
        page_size=2,
        load=None,
        policy=policy,
        guard=GuardMode.ON,
        payload=False,
        **given,
    )
    return Cache(config, clock=clock)


def serve(cache: Cache, *given: Any, **retention: Any) -> None:
    """As `life.serve`; its copies have ended."""
    life.serve(cache, *given, **retention)
    cache.drain()


def run(cache: Cache, request: Request) -> None:
    """Load back, and compute the rest of the prompt."""
    cache.load_back(request)
    cache.drain()
    life.prefill(cache, request)


def prompt(number: int) -> list[int]:
    return [1000 + number] * 8


def left(cache: Cache, *numbers: int) -> list[int]:
    """Those of some prompts that are cached still."""
    return [n for n in numbers if cache.explain(TokenKey([*prompt(n), 1])).anchor == 8]


@pytest.mark.parametrize("policy", POLICIES)
def test_data_of_a_lower_priority_leaves_first(policy: str) -> None:
    with opened(policy, host_tokens=0) as cache:
        for number, priority in enumerate((1, None, -1, 2)):
            serve(cache, prompt(number), priority=priority)
        for remaining in ((0, 1, 3), (0, 3), (3,), ()):
            cache.evict("full", 4)
            assert left(cache, 0, 1, 2, 3) == list(remaining)
        cache.check_integrity()


def test_the_end_of_a_request_may_say_otherwise() -> None:
    with opened(host_tokens=0) as cache:
        serve(cache, prompt(0), priority=5, at_end={"priority": -1})
        serve(cache, prompt(1))
        cache.evict("full", 4)
        assert left(cache, 0, 1) == [1]


def test_host_gives_up_a_lower_priority_first_too() -> None:
    with opened(write_policy="write-through") as cache:
        serve(cache, prompt(0), priority=1)
        serve(cache, prompt(1))
        cache.evict("full", 32)
        cache.evict("full", 4, Tier.HOST)
        assert left(cache, 0, 1) == [0]


@pytest.mark.parametrize("policy", POLICIES)
def test_data_whose_time_is_over_in_seconds_leaves_first(policy: str) -> None:
    clock = Time()
    with opened(policy, clock, host_tokens=0) as cache:
        serve(cache, prompt(0))
        serve(cache, prompt(1), ttl_s=10, priority=8)
        serve(cache, prompt(2), ttl_s=5)
        cache.evict("full", 4)
        assert left(cache, 0, 1, 2) == [1, 2]
        clock.now_s = 10.0
        cache.evict("full", 0)
        told = str(cache.explain(TokenKey([*prompt(1), 1])))
        assert "priority 8, expires in 10 s" in told, "the clock stands still between two polls"
        cache.poll()
        assert "priority 8, expired" in str(cache.explain(TokenKey([*prompt(1), 1])))
        serve(cache, prompt(3))
        cache.evict("full", 8)
        assert left(cache, 1, 2, 3) == [3]


def test_time_that_ends_while_data_is_pinned_counts_once_it_is_not() -> None:
    clock = Time()
    with opened("lru", clock, host_tokens=0) as cache:
        serve(cache, prompt(0))
        serve(cache, prompt(1), ttl_s=10, priority=1)
        cache.pin(TokenKey(prompt(1)), owner="me")
        clock.now_s = 10.0
        cache.poll()
        cache.unpin_all("me")
        cache.check_integrity()
        cache.evict("full", 4)
        cache.check_integrity()
        assert left(cache, 0, 1) == [0]


class CountedQueue(RecencyQueue):
    """Counts what is asked of it."""

    n_calls = 0

    def push(self, stamp: int, node: Any) -> None:
        CountedQueue.n_calls += 1
        super().push(stamp, node)

    def withdraw(self, stamp: int, node: Any) -> None:
        CountedQueue.n_calls += 1
        super().withdraw(stamp, node)


@pytest.mark.parametrize("call", ["evict", "request"])
def test_a_call_does_not_pay_for_all_whose_time_is_over(call: str) -> None:
    """As the first one after an idle hour."""
    clock = Time()
    with opened(clock=clock, host_tokens=0, device_tokens=4000) as cache:
        (full,) = cache.tree.components
        full.device.queue.use(lambda pool: CountedQueue())
        for number in range(400):
            serve(cache, prompt(number), ttl_s=10 + number % 3)
        clock.now_s = 3600.0
        cache.poll()
        CountedQueue.n_calls = 0
        if call == "evict":
            cache.evict("full", 4)
        else:
            serve(cache, prompt(1000))
        assert CountedQueue.n_calls <= 4
        cache.evict("full", 600)
        assert left(cache, *range(0, 400, 3)) == [], "their time was over first"
        last = [*range(2, 400, 3)]
        assert left(cache, *last) == last
        cache.check_integrity()


def test_a_clock_that_goes_back_stands_still() -> None:
    clock = Time()
    with opened("lru", clock, host_tokens=0) as cache:
        serve(cache, prompt(0))
        serve(cache, prompt(1), ttl_s=10, priority=1)
        for clock.now_s in (10.0, 3.0):
            cache.poll()
            cache.evict("full", 0)
        cache.check_integrity()
        cache.evict("full", 4)
        assert left(cache, 0, 1) == [0]
        serve(cache, prompt(2))
        cache.check_integrity()


def test_a_clock_may_count_requests() -> None:
    """Ranks that decide alike need no common time then (D1)."""
    begun = Time()
    with opened(clock=begun, host_tokens=0) as cache:
        for number in range(4):
            begun.now_s += 1
            serve(cache, prompt(number), ttl_s=2 if number == 1 else None)
        cache.evict("full", 4)
        assert left(cache, 0, 1, 2, 3) == [0, 2, 3]


def test_a_later_use_decides() -> None:
    with opened(host_tokens=0) as cache:
        serve(cache, prompt(0), ttl_s=0)
        serve(cache, prompt(1))
        serve(cache, [*prompt(0), 7, 7])  # its time was over; it is used again
        cache.evict("full", 4)
        assert left(cache, 0, 1) == [0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("write_policy", ["write-through", "write-back"])
def test_random_terms_keep_the_books_and_the_order(policy: str, write_policy: str) -> None:
    """The guard compares every victim with its own list, by level, score and stamp (T7)."""
    clock, draw = Time(), random.Random(5)
    with opened(policy, clock, write_policy=write_policy) as cache:
        for _ in range(30):
            clock.now_s += draw.random()
            term: dict[str, Any] = {
                "priority": draw.choice((None, None, -1, 1, 2)),
                "ttl_s": draw.choice((None, None, 0, 0.5, 2)),
            }
            serve(
                cache, [draw.randint(1, 3), 1, draw.randint(1, 2), 2] * draw.randint(1, 4), **term
            )
            if draw.random() < 0.3:
                cache.evict("full", draw.randint(1, 6))
        cache.check_integrity()
        cache.evict("full", 32)
        assert cache.tree.components[0].device.free == 32


def test_a_prefix_inherits_the_priority_of_its_last_use_and_leaves_right_behind() -> None:
    """The guard is on."""
    with opened(write_policy="write-through") as cache:
        serve(cache, prompt(0)[:4], ttl_s=0)
        serve(cache, prompt(0)[:8], {"priority": -8}, priority=8)
        serve(cache, prompt(1)[:6])
        serve(cache, prompt(2)[:6])
        assert cache.evict("full", 3, Tier.HOST) == 2 + 2
        assert cache.evict("full", 1, Tier.HOST) == 3
        assert cache.evict("full", 1, Tier.HOST) == 3


@pytest.mark.plain_build
def test_terms_that_no_data_has_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgraft_retention.lifetimes.FEWEST_RETENTIONS", 16)
    with opened() as cache:
        for number in range(100):
            serve(cache, prompt(number), priority=number % 3)
        lifetimes = cache.tree.lifetimes
        assert lifetimes is not None
        assert len(lifetimes._retentions) < 100


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"priority": 9}, "priority 9; give a whole number from -8 to 8"),
        ({"priority": 1.0}, "priority 1.0"),
        ({"ttl_s": -1}, "ttl_s -1"),
        ({"ttl_s": float("nan")}, "ttl_s nan; give seconds, 0 or more"),
        ({"ttl_s": "5"}, "ttl_s '5'"),
        (
            {"ttl_s": timedelta(days=1, seconds=5, microseconds=7)},
            r"ttl_s datetime.timedelta\(days=1, seconds=5, microseconds=7\); give seconds, 0 or",
        ),
    ],
)
def test_a_term_that_cannot_be_is_refused(given: dict[str, Any], said: str) -> None:
    with opened() as cache:
        with pytest.raises(ConfigError, match=f"begin: {said}"):
            cache.begin(TokenKey(prompt(0)), **given)
        assert not cache.requests
        assert not cache.tree.roots


def test_priorities_pins_and_clearing_go_together_with_tenants() -> None:
    """A priority decides among one tenant's data; the guard watches guarantees (K4, K5)."""
    draw = random.Random(3)
    tenants = {"a": {"namespaces": ["a"], "guarantee": 0.3}, "default": {"limit": 0.7}}
    with opened(write_policy="write-back", tenants=tenants) as cache:
        for number in range(40):
            tokens = [draw.randint(1, 3), 1, draw.randint(1, 2), 2] * draw.randint(1, 3)
            key = TokenKey(tokens, draw.choice(("a", "b", None)))
            request = cache.begin(
                key, priority=draw.choice((None, -1, 2)), ttl_s=draw.choice((None, 0, 3))
            )
            if not cache.admit(request).admitted:
                cache.abort(request)
                continue
            run(cache, request)
            cache.finish(request)
            if number % 7 == 0:
                with suppress(BudgetError):
                    cache.pin(key, owner="router", max_tokens=4)
            if number % 17 == 16:
                cache.clear(draw.choice(("a", "b", None)))
        cache.unpin_all("router")
        cache.check_integrity()
        cache.clear()
        cache.drain()
        assert cache.tree.components[0].device.free == 32
