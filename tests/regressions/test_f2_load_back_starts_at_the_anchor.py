"""F2: load-back from a node nobody accepted, and pins that counted evicted nodes (R1, L1, L3)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgraft import IntegrityError, Tier
from kvgraft.cache import Cache
from kvgraft.requests.request import Request
from kvgraft.tree import matching, operations, pinning
from kvgraft.tree.component import TreeComponent
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft.tree.tree import Tree
from kvgraft.types import Span

from ..serving.server import Server
from ..serving.setups import SETUPS, Setup

Bug = Callable[[pytest.MonkeyPatch], None]
A = list(range(100, 112))
AB = [*A, *range(200, 212)]
ABC = [*AB, *range(300, 312)]
MIXED = [name for name in SETUPS if "+" in name]


def deeper_nodes_are_on_host_for_the_base_alone(setup: Setup) -> None:
    """Resume where the base is on HOST down to B, and everything together only down to A."""
    cache = setup.open(device_tokens=128)
    server = Server(cache)
    try:
        for tokens in (A, AB, ABC):
            server.serve(tokens)
        server.empty_device()
        keepers = [server.begin([*tokens, 1]) for tokens in (A, ABC)]
        for component in cache.tree.components[1:]:
            assert component.host is not None
            cache.evict(component.name, component.host.capacity, Tier.HOST)
        for keeper in keepers:
            cache.abort(keeper)
        told = cache.explain(TokenKey([*AB, 2]))
        assert told.known == len(AB)
        assert told.components[0].accepts == len(AB)
        request = server.begin([*AB, 2, 3, 4])
        others = [server.begin([*AB, 5]), server.begin([*A, 6])]
        assert cache.admit(request).admitted
        server.load_back(request)
        cache.check_integrity()
        for other in others:
            cache.abort(other)
        server.empty_device()
        server.prefill(request)
        cache.check_integrity()
        assert request.anchor_tokens == len(A)
        cache.finish(request)
        cache.check_integrity()
    finally:
        cache.close()


@pytest.mark.parametrize("name", MIXED)
def test_load_back_starts_at_the_deepest_node_that_every_component_accepts(name: str) -> None:
    deeper_nodes_are_on_host_for_the_base_alone(SETUPS[name])


def anchor_at_the_last_host_node(patch: pytest.MonkeyPatch) -> None:
    """The field bug: the deepest node on HOST is taken without asking the other components."""

    def unasked(tree: Tree, key: TokenKey, limit: int) -> matching.Match:
        root = tree.root(key.namespace)
        node, end = matching.walk(tree, root, key, limit)
        return matching.Match(node, end, 0, end, root)

    patch.setattr(matching, "match", unasked)


def walk_from_the_last_host_node(patch: pytest.MonkeyPatch) -> None:
    """The field bug, pins excepted: only the load-back walks up from the deepest node on HOST."""
    plan = operations.load_plan

    def from_below(
        receipt: pinning.Receipt, components: tuple[TreeComponent, ...]
    ) -> list[list[Node]]:
        if receipt.host_from is None:
            return plan(receipt, components)
        node, below = receipt.anchor, [receipt.anchor]
        while below:
            each = below.pop()
            below += each.each_child()
            if each.cells[0].host is not None and each.end > node.end:
                node = each
        segments = [component.segment_at(node.end) for component in components]
        return plan(pinning.Receipt(node, segments, 0), components)

    patch.setattr(operations, "load_plan", from_below)


@pytest.mark.plain_build
@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("bug", [anchor_at_the_last_host_node, walk_from_the_last_host_node])
def test_with_the_bug_the_walk_meets_a_node_with_neither_device_nor_host_data(
    name: str, bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        deeper_nodes_are_on_host_for_the_base_alone(SETUPS[name])


def a_pin_outlives_the_load_back_that_fills_its_segment(setup: Setup) -> None:
    """Pin an evicted segment, let another request fill it, release the first pin, press."""
    cache = setup.open(device_tokens=128)
    server = Server(cache)
    try:
        server.serve(A)
        server.serve(AB)
        upper = server.begin([*A, 1])
        server.empty_device()
        before = _device_books(cache)
        early = server.begin([*AB, 2])
        assert _device_books(cache) == before
        cache.check_integrity()
        runner = server.start([*AB, 3, 4, 5])
        assert runner.anchor_tokens == early.anchor_tokens == len(AB)
        cache.check_integrity()
        cache.abort(early)
        cache.check_integrity()
        cache.abort(upper)
        server.empty_device()
        cache.check_integrity()
        server.prefill(runner)
        cache.finish(runner)
        cache.drain()
        cache.check_integrity()
        assert all(component.device.pinned == 0 for component in cache.tree.components)
        assert all(not cell.device_pins for node in cache.tree.nodes() for cell in node.cells)
    finally:
        cache.close()


def _device_books(cache: Cache) -> dict[str, dict[str, int]]:
    return {component.name: component.device.counts() for component in cache.tree.components}


@pytest.mark.parametrize("name", sorted(SETUPS))
def test_a_pin_over_an_evicted_segment_moves_no_ledger_and_is_undone_precisely(name: str) -> None:
    a_pin_outlives_the_load_back_that_fills_its_segment(SETUPS[name])


def _covered(anchor: Node, low: int, high: int) -> list[Node]:
    nodes = []
    node: Node | None = anchor
    while node is not None and node.parent is not None:
        if node.end > low and node.start < high:
            nodes.append(node)
        node = node.parent
    return nodes


def count_evicted_nodes(patch: pytest.MonkeyPatch) -> None:
    """The field bug: pinning moves the ledger by nodes without data as well."""
    pin_span, pin_state = pinning._pin_span, pinning._pin_state

    def span(tree: Tree, component: TreeComponent, anchor: Node, span: Span, stamp: int) -> int:
        moved = pin_span(tree, component, anchor, span, stamp)
        for node in _covered(anchor, *span):
            cell = node.cells[component.index]
            if cell.device is None and cell.device_pins == 1:
                moved += component.n_slots(node)
        return moved

    def state(component: TreeComponent, anchor: Node, stamp: int) -> int:
        moved = pin_state(component, anchor, stamp)
        cell = anchor.cells[component.index]
        return 1 if cell.device is None and cell.device_pins == 1 else moved

    patch.setattr(pinning, "_pin_span", span)
    patch.setattr(pinning, "_pin_state", state)


def skip_evicted_nodes_on_both_ways(patch: pytest.MonkeyPatch) -> None:
    """The field bug: acquire passes over evicted nodes, release over those evicted *then*."""
    pin_span, pin_state, unpin = pinning._pin_span, pinning._pin_state, pinning._unpin

    def span(tree: Tree, component: TreeComponent, anchor: Node, span: Span, stamp: int) -> int:
        moved = pin_span(tree, component, anchor, span, stamp)
        for node in _covered(anchor, *span):
            if node.cells[component.index].device is None:
                node.cells[component.index].device_pins -= 1
        return moved

    def state(component: TreeComponent, anchor: Node, stamp: int) -> int:
        moved = pin_state(component, anchor, stamp)
        if anchor.cells[component.index].device is None:
            anchor.cells[component.index].device_pins -= 1
        return moved

    def release(
        tree: Tree, component: TreeComponent, anchor: Node, segment: tuple[Span, ...]
    ) -> None:
        nodes = [node for low, high in segment for node in _covered(anchor, low, high)]
        for node in [anchor] if component.is_state and segment else nodes:
            if node.cells[component.index].device is None:
                node.cells[component.index].device_pins += 1
        unpin(tree, component, anchor, segment)

    patch.setattr(pinning, "_pin_span", span)
    patch.setattr(pinning, "_pin_state", state)
    patch.setattr(pinning, "_unpin", release)


@pytest.mark.plain_build
@pytest.mark.parametrize("name", sorted(SETUPS))
@pytest.mark.parametrize("bug", [count_evicted_nodes, skip_evicted_nodes_on_both_ways])
def test_with_the_bug_the_ledger_breaks(
    name: str, bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError)):
        a_pin_outlives_the_load_back_that_fills_its_segment(SETUPS[name])


@pytest.mark.parametrize("name", ["full", "full+swa+mamba", "sinks"])
@given(random=st.randoms(use_true_random=False))
def test_pins_are_undone_under_every_interleaving(name: str, random: Random) -> None:
    cache = SETUPS[name].open(device_tokens=128)
    server = Server(cache)
    for tokens in (A, AB, ABC):
        server.serve(tokens)
    held: list[Request] = []
    for _ in range(random.randint(1, 12)):
        action = random.choice(["begin", "begin", "run", "evict", "release"])
        if action == "begin":
            cut = random.choice([5, 9, 12, 17, 24, 30, 36])
            held.append(server.begin([*ABC[:cut], *range(900, 903)]))
        elif action == "run" and held:
            request = held.pop(random.randrange(len(held)))
            if cache.admit(request).admitted:
                server.load_back(request)
                server.prefill(request)
                cache.finish(request)
                cache.drain()
            else:
                cache.abort(request)
        elif action == "evict":
            component = random.choice(cache.tree.components)
            cache.evict(component.name, random.randint(1, component.device.capacity))
        elif held:
            cache.abort(held.pop(random.randrange(len(held))))
        cache.check_integrity()
    for request in held:
        cache.abort(request)
    cache.drain()
    cache.check_integrity()
    assert all(component.device.pinned == 0 for component in cache.tree.components)
    assert all(
        component.host is None or component.host.pinned == 0 for component in cache.tree.components
    )
    cache.close()
