"""Eviction policies: each keeps the contract, and each bad one is found out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from kvgraft import Cache, ConfigError, ContractViolation, TokenKey
from kvgraft.packages import policies
from kvgraft.packages.entry_points import Published
from kvgraft.packages.policies import BUILT_IN, load_policy
from kvgraft.policies import Hint, Pool, Use
from kvgraft.policies.density import Density
from kvgraft.policies.lru import LeastRecentlyUsed
from kvgraft.policies.recency import RecencyQueue
from kvgraft.testing.policies import check_policy


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_of_the_core_keeps_the_contract(name: str, seed: int) -> None:
    check_policy(lambda: load_policy(name), seed=seed)


class Forgetful(RecencyQueue):
    def push(self, stamp: int, node: Any) -> None:
        if node % 50:
            super().push(stamp, node)


class Doubling(RecencyQueue):
    def push(self, stamp: int, node: Any) -> None:
        super().push(stamp, node)
        if not node % 50:
            super().push(stamp, node)


class Restamping(RecencyQueue):
    def pop(self) -> tuple[int, Any] | None:
        entry = super().pop()
        return None if entry is None else (entry[0] + 1, entry[1])


class Keeping(RecencyQueue):
    def keep(self, wanted: Callable[[Any], object]) -> None:
        del wanted


class Gambling(RecencyQueue):
    def pop(self) -> tuple[int, Any] | None:
        first = super().pop()
        if first is None or random.random() < 0.5:
            return first
        second = super().pop()
        if second is None:
            return first
        self.push(*first)
        return second


class Untrue(RecencyQueue):
    """Scores that its victims do not follow."""

    def score(self, stamp: int) -> float | None:
        return -stamp


@pytest.mark.parametrize(
    ("order", "rule"),
    [
        (Untrue, "K2"),
        (Forgetful, "K2"),
        (Doubling, "K2"),
        (Restamping, "K2"),
        (Keeping, "K2"),
        (Gambling, "K3"),
    ],
)
def test_a_bad_order_is_found_out(order: type[RecencyQueue], rule: str) -> None:
    class Bad(LeastRecentlyUsed):
        def order(self, pool: Pool) -> RecencyQueue:
            return order()

    with pytest.raises(ContractViolation) as found:
        check_policy(Bad)
    assert found.value.rule == rule


def test_a_class_out_of_range_is_found_out() -> None:
    class Bad(Density):
        def classify(self, use: Use) -> tuple[int, Any]:
            return 256, super().classify(use)[1]

    with pytest.raises(ContractViolation, match="classify gives class 256; give an int from 0"):
        check_policy(Bad)


class Speechless(LeastRecentlyUsed):
    def describe(self, use_class: int) -> Any:
        return None


class Wordy(LeastRecentlyUsed):
    def order(self, pool: Pool) -> Any:
        class Order(RecencyQueue):
            def score(self, stamp: int) -> Any:
                return "high"

        return Order()


class Moody(LeastRecentlyUsed):
    def order(self, pool: Pool) -> Any:
        class Order(RecencyQueue):
            def score(self, stamp: int) -> float | None:
                return random.random()

        return Order()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (Speechless, "K1.*describe gives None; give a str"),
        (Wordy, "K1.*score gives 'high'; give a number or None"),
        (Moody, "K3.*rank data differently"),
        (object, "K1.*the policy has no name, classifies, order"),
    ],
)
def test_a_policy_that_cannot_say_how_it_ranks_is_found_out(policy: Any, said: str) -> None:
    with pytest.raises(ContractViolation, match=said):
        check_policy(policy)


def victims(policy: str) -> list[int]:
    """Requests in the order in which a cache evicts them, before anything is learnt."""
    cache = Cache.open(["full"], device_tokens=4096, page_size=64, policy=policy)
    chance, order = random.Random(1), []
    for number in range(60):
        serve(cache, [number] * 256)
        if chance.random() < 0.5:
            serve(cache, [max(0, number - chance.randrange(8))] * 256)
        there = {each for each in range(60) if cache.explain(TokenKey([each] * 256)).anchor}
        order.append(hash(frozenset(there)))
    cache.close()
    return order


def serve(cache: Cache, tokens: list[int], hint: str | None = None) -> int:
    request = cache.begin(TokenKey(tokens))
    assert cache.admit(request).admitted
    while n_tokens := cache.next_chunk(request):
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    cache.finish(request, hint=hint)
    return request.anchor_tokens


def test_density_is_lru_until_it_has_learnt_something() -> None:
    assert victims("density") == victims("lru")


def test_density_keeps_sequences_that_come_back_where_lru_keeps_the_latest() -> None:
    """Half of the prompts are new and never come back; 24 sequences do, each after 48 requests."""
    hits = {}
    for policy in ("lru", "density"):
        cache = Cache.open(
            ["full"], device_tokens=40 * 2048, page_size=64, payload=False, policy=policy
        )
        hits[policy] = 0
        for number in range(1200):
            serve(cache, [1_000_000 + number] * 2048)
            hits[policy] += serve(cache, [number % 24] * 2048) > 0
        cache.close()
    assert hits["lru"] == 0
    assert hits["density"] > 600


def test_sequences_that_are_over_leave_first_once_that_was_learnt() -> None:
    cache = Cache.open(
        ["full"], device_tokens=40 * 2048, page_size=64, payload=False, policy="density"
    )
    for number in range(600):
        serve(cache, [1_000_000 + number] * 2048, "over")
        serve(cache, [number % 30] * 2048, Hint.CONTINUES.value)
    there = [cache.explain(TokenKey([n] * 2048)).anchor > 0 for n in range(30)]
    assert sum(there) >= 28
    cache.close()


def test_a_policy_of_an_installed_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(LeastRecentlyUsed):
        name = "mine"

    entry = Published("mine", "mine-dist", "1.0", ("mine-dist",), lambda: Mine)
    twice = entry._replace(name="twice", owners=("one", "two"))
    broken = entry._replace(name="broken", load=lambda: object)
    monkeypatch.setattr(policies, "published", lambda group: [entry, twice, broken])
    assert isinstance(load_policy("mine"), Mine)
    with pytest.raises(ConfigError, match="published by one and two; uninstall all but one"):
        load_policy("twice")
    with pytest.raises(ConfigError, match="a object has no name, classifies, order"):
        load_policy("broken")
    with pytest.raises(ConfigError, match="use one of broken, density, lru, mine, twice"):
        load_policy("random")


def test_a_hint_that_is_none_is_refused_and_nothing_changes() -> None:
    with Cache.open(["full"], device_tokens=4096) as cache:
        request = cache.begin(TokenKey(range(100)))
        assert cache.admit(request).admitted
        with pytest.raises(ConfigError, match="finish: hint 'soon'; use one of 'continues'"):
            cache.finish(request, hint="soon")
        cache.abort(request)
    with Cache.open(["full"], device_tokens=4096) as cache:
        with pytest.raises(ConfigError, match="begin: hint 7; use one of 'continues'"):
            cache.begin(TokenKey(range(100), "space"), hint=7)  # type: ignore[arg-type]
        assert not cache.tree.roots
