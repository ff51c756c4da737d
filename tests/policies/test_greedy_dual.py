"""Data that is dear to compute again outlives data that is cheap, but leaves in the end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Cache, TokenKey
from kvgraft.policies.greedy_dual import GreedyDualQueue
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.matching import recomputed_pages
from kvgraft.tree.node import Node

PAGE = 16
SMALL: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}


@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "rise", "keep"]), st.integers(0, 40))))
def test_the_lowest_rank_leaves_though_costs_rise(calls: list[tuple[str, int]]) -> None:
    costs: dict[int, int] = {}
    queue = GreedyDualQueue(costs.__getitem__)
    entered: dict[int, int] = {}
    floor = 0
    for number, (call, value) in enumerate(calls):
        if call == "push":
            costs[number] = value
            queue.push(number // 4, number)
            entered[number] = floor
        elif call == "rise" and costs:
            costs[sorted(costs)[value % len(costs)]] += value
        elif call == "keep":
            entered = {node: its for node, its in entered.items() if node % 5 != value % 5}
            queue.keep(entered.__contains__)
        else:
            first = min(
                ((its + costs[node], node // 4, node) for node, its in entered.items()),
                default=None,
            )
            assert queue.pop() == (None if first is None else first[1:])
            if first is not None:
                floor = max(floor, first[0])
                del entered[first[2]]
        assert len(queue) == len(entered)
        assert sorted(node for _, node in queue) == sorted(entered)


def serve(cache: Cache, tokens: list[int]) -> int:
    request = cache.begin(TokenKey(tokens), chunk=256)
    assert cache.admit(request).admitted
    while request.computed < request.prompt:
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
    cache.finish(request)
    return request.anchor_tokens


def with_data(component: TreeComponent, node: Node) -> set[int]:
    """The pages on the path to a node that the component has data of; a state is its last one."""
    pages: set[int] = set()
    above: Node | None = node
    while above is not None and above.parent is not None:
        if above.cells[component.index].device is not None:
            first = above.end - 1 if component.is_state else above.start
            pages |= set(range(first, above.end))
        above = above.parent
    return pages


@pytest.mark.parametrize("seed", range(3))
def test_the_cost_is_the_way_to_the_boundary_before(seed: int) -> None:
    chance = random.Random(seed)
    bounded = {
        "swa@near": {**SMALL, "window": 40, "device_tokens": 40 * PAGE},
        "swa@far": {**SMALL, "window": 100, "device_tokens": 60 * PAGE},
        "mamba": {"n_layers": 1, "states": 12},
    }
    cache = Cache.open(
        {"full": SMALL, **bounded}, device_tokens=400 * PAGE, page_size=PAGE, policy="density"
    )
    prompts = [[chance.randrange(9)] * chance.randrange(50, 900) for _ in range(3)]
    asked = 0
    for _ in range(30):
        prompt = chance.choice(prompts)
        prompt += [chance.randrange(9) for _ in range(chance.randrange(99))]
        serve(cache, prompt[: chance.randrange(1, len(prompt)) + 1])
        for component in cache.tree.components:
            if component.is_prefix_closed:
                continue
            for node in cache.tree.nodes():
                if node.cells[component.index].device is None:
                    continue
                assert node.parent is not None
                there = with_data(component, node.parent)
                before = max(
                    boundary
                    for boundary in range(node.start + 1)
                    if not boundary
                    or all(
                        there.issuperset(range(*span)) for span in component.needed_pages(boundary)
                    )
                )
                assert recomputed_pages(component, node) == node.end - before
                asked += 1
    assert asked > 300
    cache.close()


@pytest.mark.parametrize(
    ("policy", "reused"), [("lru", 0), ("density", 2000)], ids=["lru", "density"]
)
@pytest.mark.parametrize(
    "bounded",
    [
        {"mamba": {"n_layers": 1, "states": 8}},
        {"swa": {**SMALL, "window": 2 * PAGE, "device_tokens": 60 * PAGE}},
    ],
    ids=["states", "windows"],
)
def test_the_point_behind_a_long_document_outlives_close_ones(
    bounded: dict[str, Any], policy: str, reused: int
) -> None:
    cache = Cache.open(
        {"full": SMALL, **bounded}, device_tokens=1000 * PAGE, page_size=PAGE, policy=policy
    )
    document = [7] * 2000
    serve(cache, [*document, 1])
    for turn in range(1, 40):
        serve(cache, [8] * 24 * turn)
    assert serve(cache, [*document, 2]) == reused
    cache.check_integrity()
    cache.close()
