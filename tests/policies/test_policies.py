"""Eviction policies: each keeps the contract, and the caches that have them keep other data."""

from __future__ import annotations

import random

import pytest

from kvgraft import Cache, ConfigError, TokenKey
from kvgraft.config import DENSITY, LRU
from kvgraft.optional import Published
from kvgraft.packages.registry import load_policy
from kvgraft.policies import Hint
from kvgraft.policies.recency import LeastRecentlyUsed
from kvgraft_testing.policies import check_policy

from ..serving import life
from .publishing import publish


@pytest.mark.parametrize("name", [LRU, DENSITY])
@pytest.mark.parametrize("seed", range(3))
def test_a_policy_of_the_core_keeps_the_contract(name: str, seed: int) -> None:
    check_policy(lambda: load_policy(name), seed=seed)


def victims(policy: str) -> list[int]:
    """Requests in the order in which a cache evicts them, before anything is learnt."""
    cache = Cache.open(["full"], device_tokens=4096, page_size=64, policy=policy)
    chance, order = random.Random(1), []
    for number in range(60):
        life.serve(cache, [number] * 256)
        if chance.random() < 0.5:
            life.serve(cache, [max(0, number - chance.randrange(8))] * 256)
        there = {each for each in range(60) if cache.explain(TokenKey([each] * 256)).anchor}
        order.append(hash(frozenset(there)))
    cache.close()
    return order


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
            life.serve(cache, [1_000_000 + number] * 2048)
            hits[policy] += life.serve(cache, [number % 24] * 2048).anchor_tokens > 0
        cache.close()
    assert hits["lru"] == 0
    assert hits["density"] > 600


def test_sequences_that_are_over_leave_first_once_that_was_learnt() -> None:
    cache = Cache.open(
        ["full"], device_tokens=40 * 2048, page_size=64, payload=False, policy="density"
    )
    for number in range(600):
        life.serve(cache, [1_000_000 + number] * 2048, {"hint": "over"})
        life.serve(cache, [number % 32] * 2048, {"hint": Hint.CONTINUES.value})
    there = [cache.explain(TokenKey([n] * 2048)).anchor > 0 for n in range(32)]
    assert sum(there) >= 30
    cache.close()


def test_a_policy_of_an_installed_package_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(LeastRecentlyUsed):
        name = "mine"

    entry = Published("mine", "mine-dist", "1.0", ("mine-dist",), lambda: Mine)
    twice = entry._replace(name="twice", owners=("one", "two"))
    broken = entry._replace(name="broken", load=lambda: object)
    publish(monkeypatch, entry, twice, broken)
    assert isinstance(load_policy("mine"), Mine)
    with pytest.raises(ConfigError, match="published by one and two; uninstall all but one"):
        load_policy("twice")
    with pytest.raises(ConfigError, match="an object has no name, classifies, order"):
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
