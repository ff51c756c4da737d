"""Every call ends: turns of loops are counted while nodes that wait to be stored are split."""

from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvgraft import GuardMode, Tier, TokenKey
from kvgraft_storage.tier import prefetching
from kvgraft_storage.tier.fetching import Fetch, Planning
from kvgraft_storage.tier.inventory import Bounds

from ..serving.server import Server
from ..serving.setups import SETUPS, Setup, installed
from .shelf import Shelf, open_cache, step_by_step, stocked, tier_of
from .shelf import settings as storage
from .turns import counted

PROMPT = list(range(100, 148))
STEP = 1000
"""Most turns of a call that goes on by one step; the longest prompt has 30 pages."""


def serve(server: Server, tokens: list[int]) -> None:
    request = server.start(tokens)
    server.prefill(request)
    server.cache.finish(request)
    assert server.cache.journal.drain(10)


def test_a_prefetch_that_splits_a_node_that_waits_to_be_stored_lets_polls_end() -> None:
    """It brings the window's data up to the split, and names that part alone."""
    setup, shelf = installed("full", "swa"), Shelf()
    first = Server(open_cache(setup, shelf, device_tokens=256, host_tokens=512))
    serve(first, PROMPT)
    assert first.cache.drain()
    first.cache.close()
    shelf = shelf.copy()
    server = Server(
        open_cache(setup, shelf, storage(store_nbytes=1), device_tokens=256, host_tokens=512)
    )
    cache = server.cache
    for number in range(1, 4):
        serve(server, list(range(1000 * number, 1000 * number + 20)))
    serve(server, [*PROMPT, *range(24)])
    for tier in Tier:
        if tier is not Tier.STORAGE:
            cache.evict("swa", 1000, tier)
    prefetch = tier_of(cache).prefetch(TokenKey(PROMPT))
    with counted(20_000):
        assert cache.drain()
    assert prefetch.gained_tokens == 46
    cache.check_integrity()
    cache.close()


FAMILIES = [list(range(1000 * number, 1000 * number + 48)) for number in range(2)]


class Splitting:
    """Sequences with common prefixes; the store has these, and takes one node at a time."""

    def __init__(self, setup: Setup, chance: random.Random) -> None:
        self.cache = open_cache(
            setup,
            stocked(setup, *FAMILIES, chunk=4),
            storage(store_nbytes=1),
            step_by_step(),
            device_tokens=256,
            host_tokens=256,
            guard=GuardMode.OFF,
            transfer_timeout_s=600.0,  # turns are counted here, not seconds
        )
        self.server = Server(self.cache)
        self.chance = chance

    def step(self) -> None:
        """Serve, evict on HOST, look for a prefix in the store, or poll."""
        operations = {self.serve: 2, self.evict: 2, self.prefetch: 3, self.poll: 4}
        (operation,) = self.chance.choices(list(operations), list(operations.values()))
        operation()
        self.cache.check_integrity()

    def prefix(self) -> list[int]:
        return self.chance.choice(FAMILIES)[: self.chance.randrange(10, 48)]

    def serve(self) -> None:
        with counted(20 * STEP):
            serve(self.server, [*self.prefix(), *[7] * self.chance.randrange(9)])

    def evict(self) -> None:
        component = self.chance.choice(self.cache.tree.components[-2:])
        with counted(20 * STEP):
            for tier in (Tier.DEVICE, Tier.HOST):
                self.cache.evict(component.name, self.chance.randrange(1, 40), tier)

    def prefetch(self) -> None:
        """It splits nodes that wait where its boundary is, or its window begins."""
        with counted(STEP):
            tier_of(self.cache).prefetch(TokenKey(self.prefix()))

    def poll(self) -> None:
        with counted(STEP):
            self.cache.poll()


@pytest.mark.parametrize(
    "setup",
    [
        pytest.param(each, id=name, marks=() if name == "full+swa+mamba" else pytest.mark.long)
        for name, each in SETUPS.items()
    ],
)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32))
def test_a_poll_takes_no_more_turns_however_nodes_that_wait_are_split(
    setup: Setup, seed: int
) -> None:
    traffic = Splitting(setup, random.Random(seed))
    try:
        for _ in range(30):
            traffic.step()
        with counted(20_000):
            assert traffic.cache.drain()
        traffic.cache.check_integrity()
    finally:
        traffic.cache.close()


def test_data_that_comes_behind_the_plan_of_a_prefetch_stops_no_poll(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, plans = Fetch._plan, itertools.count()

    def late(self: Fetch, bounds: Bounds, least: int) -> Planning:
        """The first plan finds no boundary; data comes before the next one."""
        if next(plans):
            return (yield from plan(self, bounds, least))
        return None

    monkeypatch.setattr(Fetch, "_plan", late)
    setup = installed("full")
    cache = open_cache(setup, stocked(setup, PROMPT), device_tokens=256, host_tokens=256)
    prefetches = [tier_of(cache).prefetch(TokenKey(PROMPT)) for _ in range(2)]
    with counted(20_000):
        assert cache.drain()
    assert all(each.ended for each in prefetches)
    cache.close()


def test_prompts_are_compared_page_by_page_where_a_page_is_longer_than_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefetching, "COMPARED_NBYTES", 4)
    setup = installed("full")
    cache = open_cache(setup, stocked(setup, PROMPT), device_tokens=256, host_tokens=256)
    prefetches = [tier_of(cache).prefetch(TokenKey(PROMPT)) for _ in range(2)]
    with counted(20_000):
        assert cache.drain()
    assert [each.gained_tokens for each in prefetches] == [46, 46]
    assert prefetches[1].shared
    cache.close()


def test_a_drain_over_a_store_that_hangs_ends_and_says_so() -> None:
    shelf, setup = Shelf(), installed("full")
    server = Server(open_cache(setup, shelf, timeout_s=0.05))
    cache = server.cache
    shelf.gate.clear()
    serve(server, PROMPT)
    with counted(20_000):
        assert not cache.drain()
    assert tier_of(cache).n_in_flight
    shelf.gate.set()
    assert tier_of(cache).drain(60)
    assert cache.drain()
    cache.close()
