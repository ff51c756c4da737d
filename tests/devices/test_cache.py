"""The whole cache on the simulated device: every access in order, under any schedule."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraft import Cache, ContractViolation, TokenKey, WritePolicy
from kvgraft.config import GuardMode
from kvgraft.types import Direction
from kvgraft_testing.simulated import SimulatedDevice, Unordered

from .mutants import LEGAL, MUTANTS
from .player import Draw, Player

SETS = (
    ("full",),
    ("full", "swa", "mamba"),
    ("full", "swa"),
    ("full", "swa", "mamba", "hisparse"),
    ("mamba", "full"),
    ("swa",),
)
POLICIES = tuple(WritePolicy)

SEEDS, OPERATIONS = 40, 150
"""Runs in which a mutant is looked for."""

MANY = 200_000


def played(seed: int, n_operations: int) -> Player:
    """A run of one component set under one policy, not closed yet."""
    draw = random.Random(seed)
    device = SimulatedDevice(lambda n: draw.randrange(n) if draw.random() < 0.5 else 0)
    policy = POLICIES[seed // len(SETS) % len(POLICIES)]
    player = Player(device, SETS[seed % len(SETS)], policy)
    try:
        player.play(draw.randrange, n_operations)
    except AssertionError:
        assert device.unordered, "wrong, and everything is in order"
        device.finish()
    return player


def found(n_seeds: int) -> Unordered | None:
    """The first pair of accesses that nothing orders."""
    for seed in range(n_seeds):
        try:
            player = played(seed, OPERATIONS)
            player.close()
        except ContractViolation:
            pass
        if player.device.unordered:
            return player.device.unordered[0]
    return None


def test_a_prefix_is_backed_up_evicted_and_loaded_back() -> None:
    player = Player(SimulatedDevice(), ["full", "mamba"])
    prompt = list(range(16))
    player.serve([*prompt, 1, 2], 3)
    player.empty_device()
    assert player.serve([*prompt, 7, 8, 9]).anchor_tokens == 16
    completed = {way: each.completed for way, each in player.cache.journal.counters.items()}
    assert completed[Direction.LOAD_BACK] == 1
    assert completed[Direction.BACKUP] > 1
    assert any("on stream gather" in step for step in player.device.schedule)
    player.close()


def test_a_device_that_is_lost_fails_its_loads_and_lets_the_cache_go() -> None:
    player = Player(SimulatedDevice(), ["full", "mamba"])
    prompt = list(range(16))
    player.serve([*prompt, 1, 2], 3)
    player.empty_device()
    cache, failed = player.cache, player.cache.journal.counters
    for n_failed in (1, 2):  # lost beneath a load, and before one
        request = cache.begin(TokenKey([*prompt, 5]))
        assert cache.admit(request).admitted
        assert cache.load_back(request)
        player.device.lose()
        cache.poll()
        assert request.load_failed
        assert failed[Direction.LOAD_BACK].failed == n_failed
        cache.abort(request)
    cache.check_integrity()
    cache.close()


def test_a_cache_is_opened_on_the_simulated_device_by_its_name() -> None:
    cache = Cache.open(["full"], device_tokens=64, host_tokens=64, device="simulated")
    (pool,) = (each.component.device for each in cache.mounted)
    assert pool.planes[0].device.type == "privateuseone"
    cache.close()


@pytest.mark.parametrize("seed", range(len(SETS)))
def test_every_access_is_in_order_and_every_byte_right(seed: int) -> None:
    played(seed, 300).close()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_the_guard_finds_nothing_on_the_device(names: Sequence[str]) -> None:
    draw = random.Random(len(names))
    device = SimulatedDevice(lambda n: draw.randrange(n) if draw.random() < 0.5 else 0)
    player = Player(device, names, WritePolicy.WRITE_BACK, guard=GuardMode.ON)
    player.play(draw.randrange, 150)
    player.close()
    assert player.cache.guard is not None
    assert player.cache.guard.looked_at > 100


@settings(deadline=None)
@given(
    names=st.sampled_from(SETS),
    policy=st.sampled_from(POLICIES),
    calls=st.lists(st.integers(0, 119), max_size=60),
    schedule=st.lists(st.integers(0, 11), max_size=60),
)
def test_no_schedule_reorders_what_must_not_be(
    names: Sequence[str], policy: WritePolicy, calls: list[int], schedule: list[int]
) -> None:
    player = Player(SimulatedDevice(drawn_from(schedule)), names, policy)
    player.play(drawn_from(calls), len(calls))
    player.close()


def drawn_from(values: Sequence[int]) -> Draw:
    """Draws the values in turn, and then 0."""
    left = iter(values)
    return lambda n: next(left, 0) % n


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_in_the_order_is_named_with_its_rule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    MUTANTS[name].put_in(monkeypatch)
    pair = found(SEEDS)
    assert pair is not None, "survived"
    assert pair.rule in MUTANTS[name].rules, pair


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", LEGAL)
def test_an_odd_order_that_is_legal_is_not_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    LEGAL[name].put_in(monkeypatch)
    assert found(len(SETS)) is None


@pytest.mark.long
def test_nothing_is_out_of_order_in_many_random_operations() -> None:
    n_operations = seed = 0
    while n_operations < MANY:
        player = played(1000 + seed, 1000)
        player.close()
        n_operations += player.operations
        seed += 1
