"""Data from a store is inserted where allowed, and marked as stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvgraft import Tier, TokenKey, WritePolicy
from kvgraft.cache import Cache
from kvgraft.tree import matching
from kvgraft.tree.ledger import SlotOwner
from kvgraft.tree.node import Node
from kvgraft_guard.integrity import check_integrity
from kvgraft_storage.tier.arriving import Arrival, arrive
from kvgraft_storage.tier.inventory import backed_on_host
from kvgraft_testing.stepped import SteppedTransferEngine

from ..serving.server import Server
from ..serving.setups import SETUPS, Setup, installed
from .shelf import addresses, drained, open_cache, settings, stocked, tier_of

PROMPT = list(range(100, 133))
PAGES = 16
HYBRID = installed("full", "swa", "mamba")
SEEDS = 25
LARGE: dict[str, Any] = {"device_tokens": 256, "host_tokens": 512}


def grow(cache: Cache, engine: SteppedTransferEngine, chance: random.Random) -> None:
    """Prefixes of the prompt and forks of it come and go; copies are left under way."""
    server = Server(cache)
    for _ in range(4):
        length = chance.randrange(2, len(PROMPT))
        tokens = PROMPT[:length] + [7] * chance.randrange(3)
        engine.run_all()
        cache.poll()
        request = cache.begin(TokenKey(tokens))
        if not cache.admit(request).admitted:
            cache.abort(request)
            continue
        cache.load_back(request)
        if chance.random() < 0.3:
            cache.abort(request)  # its load-back goes on
            continue
        engine.run_all()
        cache.poll()
        server.prefill(request)
        cache.finish(request)
        if chance.random() < 0.5:
            engine.run_all()
            cache.poll()
        for component in cache.tree.components:
            for tier in (Tier.DEVICE, Tier.HOST):
                if chance.random() < 0.4:
                    cache.evict(component.name, chance.randrange(1, 12), tier)


def starts(cache: Cache) -> Iterator[Node]:
    """Where an arrival may begin: the root, and nodes of the prompt that are backed on HOST."""
    tree = cache.tree
    root = tree.root(None)
    yield root
    path = matching.follow(tree, root, TokenKey(PROMPT).data, PAGES - 1)
    for node in path.nodes:
        if node.end > path.end or not backed_on_host(tree, node):
            return
        yield node


def arrival_of(cache: Cache, start: int, chance: random.Random) -> Arrival:
    """Some pages of each component, on slots reserved for them."""
    there, slots = [], []
    share = chance.choice([0.3, 0.8, 1.0])
    for component in cache.tree.components:
        n_slots = 1 if component.is_state else component.slots_per_page
        came = np.zeros(PAGES - start, dtype=np.bool_)
        mine = np.zeros((PAGES - start, n_slots), dtype=np.int32)
        (ledger,) = component.hosts
        assert ledger is not None
        for page in range(PAGES - start):
            if chance.random() < share and ledger.free >= n_slots:
                came[page] = True
                mine[page] = np.frombuffer(ledger.reserve(n_slots) or b"", np.int32)
        there.append(came)
        slots.append(mine)
    hashes = bytes(32) * (PAGES - start)
    return Arrival(TokenKey(PROMPT), hashes, start, there, slots, 1)


def anchor(cache: Cache, limit: int) -> int:
    return matching.match(cache.tree, TokenKey(PROMPT), limit).anchor


@pytest.mark.one_in(6)
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
@pytest.mark.rule("S1")
def test_arriving_pages_are_inserted_where_allowed_and_the_caller_keeps_the_rest(
    setup: Setup, policy: WritePolicy
) -> None:
    for seed in range(SEEDS):
        chance, engine = random.Random(seed), SteppedTransferEngine()
        cache = setup.open(
            engine=engine, policy=policy, timeout_s=1e-6, device_tokens=96, host_tokens=96
        )
        tree = cache.tree
        tree.hold_root(None)
        grow(cache, engine, chance)
        start = chance.choice([*starts(cache)])
        arrival = arrival_of(cache, start.end, chance)
        end = chance.randrange(start.end + 1, PAGES + 1)
        whole = anchor(cache, start.end) == start.end and all(
            mask[: end - start.end].all() for mask in arrival.there
        )
        tip, n_pages = start, chance.choice([1, 4, PAGES])
        while tip.end < end:
            tip = arrive(tree, tip, end, arrival, n_pages)
        tree.prune(tip)
        leaves = any(
            cell.device is None and cell.host is None and cell.incoming is not None
            for node in tree.nodes()
            for cell in node.cells
        )
        if whole and not leaves:
            assert anchor(cache, end) == end, "all of it came"
        fails = chance.random() < 0.5
        owners = [
            SlotOwner(component.name, Tier.HOST, "an arrival", slots[there].tobytes())
            for component, there, slots in zip(tree.components, arrival.there, arrival.slots)
        ]
        check_integrity(tree, [], owners)
        while engine.pending:
            chance.choice([engine.step, engine.fail] if fails else [engine.step])()
        cache.poll()
        if whole and not fails:
            assert anchor(cache, end) == end, "copies of evicted data bring the rest"
        check_integrity(tree, [], owners)
        for name, _, _, slots, _ in owners:
            (ledger,) = tree.component(name).hosts
            assert ledger is not None
            ledger.cancel(slots)
        for tier in (Tier.DEVICE, Tier.HOST):
            for component in (
                *tree.components,
                *tree.components,
            ):  # data below the first is gone
                cache.evict(component.name, 1000, tier)
            engine.run_all()
            cache.poll()
        assert not tree.n_nodes
        cache.close()


@pytest.mark.parametrize("origin", ["fetched", "stored", "on its way there"])
def test_data_that_a_node_gains_later_is_stored(origin: str) -> None:
    """Windows and states at boundaries where the store had none, on parts of its data."""
    shelf = stocked(HYBRID, PROMPT)
    cache = open_cache(HYBRID, shelf, **LARGE)
    server = Server(cache)

    def compute(tokens: list[int]) -> None:
        request = server.start(tokens)
        server.prefill(request)
        cache.finish(request)
        assert cache.journal.drain(10)
        cache.poll()

    if origin == "fetched":
        prefetch = tier_of(cache).prefetch(TokenKey(PROMPT))
        assert drained(cache, prefetch).gained_tokens == 2 * PAGES
    else:
        shelf.stored.clear()
        if origin == "on its way there":
            shelf.gate.clear()
        compute(PROMPT)
        assert origin != "stored" or cache.drain()
    boundaries = [PAGES - 1, PAGES // 2]
    for pages in boundaries:
        compute(PROMPT[: 2 * pages])
    shelf.gate.set()
    assert cache.drain()
    for pages in boundaries:
        for name, first in (("full", 0), ("swa", pages - 3), ("mamba", pages - 1)):
            for page in addresses(cache, PROMPT, name)[first:pages]:
                assert all(each.key in shelf.stored for each in page), (name, pages)
    cache.close()


def test_data_on_host_before_is_not_taken_for_stored() -> None:
    """The store has a state, and lost the pages that lie below it on HOST."""
    setup = installed("full", "mamba")
    shelf = stocked(setup, PROMPT)
    cache = open_cache(setup, shelf, settings(store="second-touch"), **LARGE)
    pages = [each.key for page in addresses(cache, PROMPT, "full") for each in page]
    for key in pages:
        del shelf.stored[key]
    Server(cache).serve([*PROMPT, 1])
    for tier in (Tier.DEVICE, Tier.HOST):
        cache.evict("mamba", 100, tier)
    prefetch = drained(cache, tier_of(cache).prefetch(TokenKey(PROMPT)))
    assert (prefetch.anchor_tokens, prefetch.gained_tokens) == (0, 2 * PAGES)
    cache.abort(cache.begin(TokenKey(PROMPT)))
    assert cache.drain()
    assert {*pages} <= shelf.stored.keys()
    cache.close()
