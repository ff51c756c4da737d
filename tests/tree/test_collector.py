"""The garbage collector visits no node, and a tree that goes leaves nothing behind."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import Counter
from copy import copy
from typing import Any

import pytest
import torch

from kvgraft import Cache, TokenKey
from kvgraft.tree.tree import Tree

from ..serving import life
from .books import insert, open_tree

PAGE = 4
SMALL: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}
COMPONENTS: dict[str, dict[str, Any]] = {
    "full": SMALL,
    "swa": {**SMALL, "window": 8},
    "mamba": {"n_layers": 1, "states": 256},
}


def serve(cache: Cache, n_conversations: int) -> None:
    """Conversations of four turns behind a prompt that all share, one branch each."""
    for number in range(n_conversations):
        key = TokenKey([7] * PAGE)
        for turn in range(4):
            key.extend([number, turn, *range(2 * PAGE)])
            request = cache.begin(key)
            if not cache.admit(request).admitted:
                assert cache.drain(), "copies hold pages as long as they take"
                assert cache.admit(request).admitted
            life.prefill(cache, request)
            cache.finish(request)
            cache.poll()


@pytest.mark.one_in(12)
@pytest.mark.parametrize("policy", ["lru", "density"])
@pytest.mark.parametrize("names", [("full",), ("full", "swa"), ("full", "swa", "mamba")])
@pytest.mark.parametrize("host_tokens", [0, 20_000])
def test_the_collector_visits_fewer_objects_than_there_are_nodes(
    names: tuple[str, ...], policy: str, host_tokens: int
) -> None:
    components = {name: COMPONENTS[name] for name in names}
    with Cache.open(
        components,
        page_size=PAGE,
        device_tokens=6_000,
        host_tokens=host_tokens,
        load=None,
        policy=policy,
    ) as cache:
        serve(cache, 20)
        cache.drain()
        gc.collect()
        before, nodes = Counter(map(type, gc.get_objects())), cache.tree.n_nodes
        serve(cache, 150)
        cache.drain()
        gc.collect()
        after = Counter(map(type, gc.get_objects()))
        added = cache.tree.n_nodes - nodes
        assert added > 250
        assert (after - before).total() < added
        cache.check_integrity()


def test_a_key_that_an_engine_keeps_is_one_object_for_the_collector() -> None:
    with Cache.open({"full": {}}, page_size=16, device_tokens=64_000, payload=False) as cache:
        keys = [TokenKey(range(number, number + 1100)) for number in range(20)]
        keys += [copy(key) for key in keys]
        for key in keys:
            request = cache.begin(key)
            assert cache.admit(request).admitted
            cache.abort(request)
    visited = {id(each) for each in gc.get_objects()}
    assert all(len(key.sums) == 1 for key in keys)
    assert not any(id(key.sums) in visited for key in keys)


def test_the_collector_visits_no_prefix_that_the_policy_remembers() -> None:
    with Cache.open(["full"], page_size=64, device_tokens=50_000, payload=False) as cache:

        def serve_prompts(first: int, n_prompts: int) -> None:
            for number in range(first, first + n_prompts):
                request = cache.begin(TokenKey([number] * 4096))
                assert cache.admit(request).admitted
                assert cache.allocate(request, request.prompt)
                cache.computed(request, request.prompt)
                cache.finish(request)

        serve_prompts(0, 20)
        gc.collect()
        before = Counter(map(type, gc.get_objects()))
        serve_prompts(20, 60)
        gc.collect()
        assert (Counter(map(type, gc.get_objects())) - before).total() < 60


@pytest.mark.one_in(3)
@pytest.mark.parametrize("guard", ["off", "on"])
@pytest.mark.parametrize("tenants", [{}, {"a": {"namespaces": ["a"], "guarantee": 0.25}}])
def test_a_cache_dropped_with_copies_in_flight_leaves_no_tree_behind(
    tenants: dict[str, Any], guard: str
) -> None:
    def serve_and_drop() -> None:
        cache = Cache.open(
            {"full": {}},
            page_size=PAGE,
            device_tokens=320,
            host_tokens=640,
            payload=False,
            tenants=tenants,
            guard=guard,
            write_policy="write-through",
        )
        request = cache.begin(TokenKey([8] * 20 * PAGE))
        assert cache.admit(request).admitted
        assert cache.allocate(request, request.prompt)
        cache.computed(request, request.prompt)
        cache.finish(request)
        assert cache.journal.operations()

    def n_trees() -> int:
        gc.collect()
        return sum(issubclass(type(each), Tree) for each in gc.get_objects())

    before = n_trees()
    serve_and_drop()
    assert n_trees() == before


def test_a_cache_dropped_unclosed_frees_its_pools_and_stops_its_threads() -> None:
    def copying() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("kvgraft-copy")}

    def serve_and_drop() -> list[weakref.ref[torch.Tensor]]:
        cache = Cache.open(
            {"full": SMALL},
            page_size=PAGE,
            device_tokens=320,
            host_tokens=640,
            write_policy="write-through",
        )
        serve(cache, 10)
        assert cache.drain()
        assert copying() - before
        assert cache.stats().backups.completed
        return [weakref.ref(each) for each in cache.mounted[0].component.device.planes]

    before = copying()
    planes = serve_and_drop()
    gc.collect()
    deadline = time.monotonic() + 30
    while (copying() - before or any(each() for each in planes)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not copying() - before
    assert [each() for each in planes] == [None] * len(planes)


def fill(tree: Tree) -> None:
    for number in range(200):
        node = insert(tree, [number // 100, 0, number, *range(5)])
    node.names = None


def test_a_tree_that_goes_leaves_no_node_behind() -> None:
    def fill_and_drop() -> None:
        tree = open_tree("full", "window", "state", capacity=4096)
        fill(tree)
        assert tree.n_nodes > 200

    fill_and_drop()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(5):
        fill_and_drop()
    gc.collect()
    assert sys.getallocatedblocks() - before < 200
