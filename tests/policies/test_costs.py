"""Data that is dear to compute again outlives data that is cheap, but leaves in the end."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import Cache
from kvgraft.policies.policy import CLASS_BITS
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.matching import cost_of_losing
from kvgraft.tree.node import KINDS, Node
from kvgraft.types import PointKind, Tier
from kvgraft_density.policy import Clock, DensityOrder, level_of

from ..serving import life

PAGE = 16
SMALL: dict[str, Any] = {"n_layers": 1, "n_kv_heads": 1, "head_dim": 2}


@given(
    st.lists(st.tuples(st.sampled_from(["push", "pop", "rise", "withdraw"]), st.integers(0, 40)))
)
def test_the_least_cost_leaves_though_costs_rise(calls: list[tuple[str, int]]) -> None:
    """Until something is learnt, and while all are of an age: within a level the oldest."""
    costs: dict[int, int] = {}
    pool = Ledger("state", Tier.DEVICE, SlotAllocator(64))
    order = DensityOrder(pool, Clock(), costs.__getitem__)
    entered: set[int] = set()
    for number, (call, value) in enumerate(calls):
        if call == "push":
            costs[number] = value
            order.push(number // 4, number)
            entered.add(number)
        elif call == "rise" and costs:
            costs[sorted(costs)[value % len(costs)]] += value
        elif call == "withdraw" and entered:
            node = sorted(entered)[value % len(entered)]
            order.withdraw(node // 4, node)
            entered.remove(node)
        else:
            ranks = [(level_of(costs[node]), node // 4, node) for node in entered]
            first = min(ranks, default=None)
            assert order.pop() == (None if first is None else first[1:])
            if first is not None:
                entered.remove(first[2])
        assert len(order) == len(entered)
        assert sorted(node for _, node in order) == sorted(entered)


def test_a_cost_that_fell_counts_once_it_is_entered_again() -> None:
    costs = dict.fromkeys(range(7), 1000)
    order = DensityOrder(
        Ledger("state", Tier.DEVICE, SlotAllocator(64)), Clock(), costs.__getitem__
    )
    for node in costs:
        order.push(node, node)
    costs[6] = 1
    order.withdraw(6, 6)
    order.push(6, 6)
    assert [order.pop(), order.pop()] == [(6, 6), (0, 0)]


def test_a_candidate_whose_cost_is_unknown_is_withdrawn_with_its_own_stamp() -> None:
    ledger = Ledger("state", Tier.DEVICE, SlotAllocator(64))
    order = DensityOrder(ledger, Clock(), lambda node: 1)
    order.push(3 << CLASS_BITS, "node")
    order.push(4 << CLASS_BITS, "other")
    order.pop()
    order.push(5 << CLASS_BITS, "node")
    with pytest.raises(LookupError, match="'node' is not entered with stamp 1536"):
        order.withdraw(6 << CLASS_BITS, "node")
    order.withdraw(5 << CLASS_BITS, "node")
    assert [entry[1] for entry in order] == ["other"]


def test_a_cost_that_fell_counts_while_its_candidate_waits() -> None:
    costs = dict.fromkeys(range(40), 1000)
    order = DensityOrder(
        Ledger("state", Tier.DEVICE, SlotAllocator(64)), Clock(), costs.__getitem__
    )
    for node in costs:
        order.push(node << CLASS_BITS, node)
    assert order.pop() == (0, 0)
    costs[39] = 1
    taken = [entry[1] for _ in range(39) if (entry := order.pop())]
    assert taken.index(39) <= 30, "every victim asks for one more cost"


def serve(cache: Cache, tokens: list[int]) -> int:
    return life.serve(cache, tokens, chunk=256).anchor_tokens


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


def resumable(component: TreeComponent, there: set[int], boundaries: range) -> list[int]:
    """Those of `boundaries` at which it can resume, given the pages with data; 0 among them."""
    return [
        each
        for each in boundaries
        if not each or all(there.issuperset(range(*span)) for span in component.needed_pages(each))
    ]


def line(component: TreeComponent, node: Node, most: int) -> list[Node]:
    """The nodes on the only line below `node`, itself the first."""
    found = [node]
    while len(found) <= most and isinstance(found[-1].children, Node):
        found.append(found[-1].children)
    return found


def expected(component: TreeComponent, node: Node) -> int:
    """`cost_of_losing` by trying every boundary."""
    assert node.parent is not None
    before = max(resumable(component, with_data(component, node.parent), range(node.start + 1)))
    below = line(component, node, 99)
    there = with_data(component, below[-1])
    if component.is_state:
        boundary, width, end = node.end, 1, node
    else:
        window = component.window_pages
        assert window is not None
        its = [node]
        for each in below[1:]:
            if each.start - node.end >= window or each.cells[component.index].device is None:
                break
            its.append(each)
        found = resumable(component, there, range(node.start + 1, its[-1].end + 1))
        if not found:
            return 0
        boundary = found[-1]
        width = min(window, boundary)
        end = next(each for each in its if each.end >= boundary)
    gained = boundary - before
    parted = len(end.points) == end.end - end.start and KINDS[end.points[-1]] is PointKind.BRANCH
    if end.end == boundary and not parted:
        for each in line(component, end, 16)[1:]:
            if each.cells[component.index].device is None:
                continue
            further = resumable(component, there, range(each.start + 1, each.end + 1))
            if further:
                between = further[-1] - boundary
                return gained * between * 1024 // (gained + between) // width
    return gained * 1024 // width


@pytest.mark.parametrize("seed", range(3))
def test_the_cost_is_what_hits_would_compute_again(seed: int) -> None:
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
                if node.cells[component.index].device is not None:
                    assert cost_of_losing(component, node) == expected(component, node)
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
