"""Prefetches, stores, evictions, splits and requests in any order: books and bytes stay right."""

from __future__ import annotations

import random
from functools import lru_cache

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from kvgraft import Tier, TokenKey, WritePolicy
from kvgraft.requests.request import Request
from kvgraft_storage.settings import PrefetchPolicy, StorePolicy
from kvgraft_storage.tier import Prefetch, fetching, naming

from ..serving.server import Server
from ..serving.setups import SETUPS, Setup, one_of_each_kind
from . import shelf as shelves
from .shelf import Shelf, open_cache, stocked, tier_of

FAMILIES = 3
STEPS = 40


class Traffic:
    """Random operations on one cache; prompts share prefixes, so that nodes split."""

    def __init__(self, server: Server, shelf: Shelf, chance: random.Random) -> None:
        self.server = server
        self.cache = server.cache
        self.shelf = shelf
        self.chance = chance
        self.waiting: list[tuple[TokenKey, Prefetch]] = []
        self.running: list[Request] = []

    def key(self) -> TokenKey:
        family, fork = self.chance.randrange(FAMILIES), self.chance.randrange(4, 30)
        tokens = [*range(family * 1000, family * 1000 + fork)]
        tokens += [family * 1000 + 500 + self.chance.randrange(3)] * self.chance.randrange(1, 6)
        return TokenKey(tokens)

    def step(self) -> None:
        operations = {
            self.queue: 6,
            self.begin: 4,
            self.advance: 6,
            self.cancel: 1,
            self.evict: 3,
            self.gate: 2,
            self.cache.poll: 4,
            self.lose: 0.2,
            self.swap: 0.5,
            self.clear: 0.3,
        }
        (operation,) = self.chance.choices(list(operations), list(operations.values()))
        operation()
        self.cache.check_integrity()

    def queue(self) -> None:
        key = self.key()
        self.waiting.append((key, tier_of(self.cache).prefetch(key)))

    def begin(self) -> None:
        ready = [each for each in self.waiting if each[1].ready]
        if not ready:
            return
        key, prefetch = self.chance.choice(ready)
        self.waiting.remove((key, prefetch))
        request = self.cache.begin(key, chunk=8, prefetch=prefetch)
        assert request.storage_tokens <= request.anchor_tokens
        if not self.cache.admit(request).admitted:
            self.cache.abort(request)
            return
        self.server.load_back(request)
        self.running.append(request)

    def advance(self) -> None:
        if not self.running:
            return
        request = self.chance.choice(self.running)
        if request.computed < request.prompt:
            n_tokens = self.cache.next_chunk(request)
            if n_tokens:
                self.server.step(request, n_tokens)
                self.cache.checkpoint(request)
            return
        self.running.remove(request)
        self.server.read(request)
        self.cache.finish(request)

    def cancel(self) -> None:
        if self.waiting:
            tier_of(self.cache).cancel(self.waiting.pop()[1])

    def evict(self) -> None:
        component = self.chance.choice(self.cache.tree.components)
        tier = self.chance.choice([Tier.DEVICE, Tier.HOST])
        self.cache.evict(component.name, self.chance.randrange(1, 20), tier)

    def gate(self) -> None:
        if self.shelf.gate.is_set():
            self.shelf.gate.clear()
        else:
            self.shelf.gate.set()

    def lose(self) -> None:
        for key in list(self.shelf.stored):
            if self.chance.random() < 0.2:
                self.shelf.stored.pop(key, None)

    def swap(self) -> None:
        """Let go of the store, and take it into use again."""
        tier = tier_of(self.cache)
        if tier.client.attached:
            tier.detach(0.01)
            return
        self.shelf.gate.set()
        shelves.until(lambda: tier.client.closed, self.cache)
        self.shelf = self.shelf.copy()
        tier.attach(self.shelf)

    def clear(self) -> None:
        self.cache.clear()

    def end(self) -> None:
        self.shelf.gate.set()
        for _, prefetch in self.waiting:
            tier_of(self.cache).cancel(prefetch)
        for request in self.running:
            self.cache.abort(request)
        assert self.cache.drain()
        assert tier_of(self.cache).prefetching.nbytes_in_flight == 0
        self.cache.check_integrity()
        for component in self.cache.tree.components:
            for tier in (Tier.DEVICE, Tier.HOST):
                self.cache.evict(component.name, 1000, tier)
        assert not self.cache.tree.n_nodes, "nothing is held any more"


@lru_cache
def _stocked(name: str) -> Shelf:
    """A store with the longest sequence of every family."""
    families = [range(1000 * number, 1000 * number + 30) for number in range(FAMILIES)]
    return stocked(SETUPS[name], *families, chunk=4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("setup", one_of_each_kind())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    policies=st.tuples(
        st.sampled_from(StorePolicy), st.sampled_from(PrefetchPolicy), st.sampled_from(WritePolicy)
    ),
    room=st.tuples(st.sampled_from([24, 64]), st.sampled_from([2000, 1 << 30])),
    synchronous=st.booleans(),
    stepping=st.booleans(),
)
def test_in_any_order_books_and_bytes_stay_right(
    setup: Setup,
    seed: int,
    policies: tuple[StorePolicy, PrefetchPolicy, WritePolicy],
    room: tuple[int, int],
    synchronous: bool,  # noqa: FBT001 - drawn
    stepping: bool,  # noqa: FBT001 - drawn
) -> None:
    """With `stepping` every call of the cache goes on by one step only, of pieces of two pages.

    HOST and the bytes of prefetches are so few that many wait for room.
    """
    store, prefetch, write = policies
    host_tokens, nbytes = room
    shelf = _stocked(setup.name).copy(synchronous=synchronous)
    given_ = shelves.settings(
        store=store, prefetch=prefetch, prefetch_timeout_s=1e-3, prefetch_nbytes=nbytes
    )
    pace = shelves.step_by_step() if stepping else shelves.AT_ONCE
    sizes = {"device_tokens": 96, "host_tokens": host_tokens}
    cache = open_cache(setup, shelf, given_, pace, policy=write, **sizes)
    traffic = Traffic(Server(cache), shelf, random.Random(seed))
    try:
        with pytest.MonkeyPatch.context() as patch:
            if stepping:
                patch.setattr(fetching, "PIECE_PAGES", 2)
                patch.setattr(fetching, "ASKED_PAGES", 2)
                patch.setattr(naming, "BLOCK_PAGES", 2)
            for _ in range(STEPS):
                traffic.step()
            traffic.end()
    finally:
        traffic.shelf.gate.set()
        shelf.gate.set()
        cache.close()
