"""A prefetch brings the data its definition says, in every situation (S1 to S5)."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from kvgraft import TokenKey, WritePolicy
from kvgraft.cache import Cache
from kvgraft.tree import matching
from kvgraft.tree.component import TreeComponent
from kvgraft_storage.tier import Prefetch

from ..serving.server import Server
from ..serving.setups import Setup, one_of_each_kind
from .shelf import Shelf, addresses, drained, open_cache, stocked, tier_of

PROMPT = list(range(100, 137))
PAGE = 2
LIMIT = (len(PROMPT) - 1) // PAGE
SHELVES: dict[str, Shelf] = {}


class Known(NamedTuple):
    """Where the data of a component is, page by page; a state's under the page it ends."""

    readable: set[int]
    host: set[int]
    stored: set[int]


def shelf_of(setup: Setup) -> Shelf:
    """A cache's data for the prompt, in chunks of four tokens; made once per set."""
    if setup.name not in SHELVES:
        SHELVES[setup.name] = stocked(setup, PROMPT, chunk=4)
    return SHELVES[setup.name].copy()


def look(cache: Cache, shelf: Shelf, component: TreeComponent) -> Known:
    """Where everything is, read off the tree's nodes and the store's keys."""
    known = Known(set(), set(), set())
    path = matching.follow(cache.tree, cache.tree.root(None), TokenKey(PROMPT).data, LIMIT)
    for node in path.nodes:
        cell = node.cells[component.index]
        pages = range(node.start, min(node.end, path.end))
        if component.is_state:
            pages = range(node.end - 1, node.end) if node.end <= path.end else range(0)
        if matching.readable(cell, component, device_only=False):
            known.readable.update(pages)
        if cell.host is not None:
            known.host.update(pages)
    for page, names in enumerate(addresses(cache, PROMPT, component.name)):
        if all(each.key in shelf.stored for each in names):
            known.stored.add(page)
    return known


def pages_at(component: TreeComponent, boundary: int) -> list[int]:
    """The pages a component needs at a boundary, by its reach."""
    if component.is_state:
        return [boundary - 1]
    return [page for span in component.reach_pages.spans(boundary) for page in range(*span)]


def expected(cache: Cache, shelf: Shelf, threshold: int) -> int:
    """The deepest boundary, by looking at each: everything there or stored, and room for it."""
    components = cache.tree.components
    known = [look(cache, shelf, component) for component in components]
    anchor = matching.match(cache.tree, TokenKey(PROMPT), LIMIT).anchor
    closed = cache.tree.prefix_closed_host
    whole = [component for component in components if component.is_prefix_closed] or [components[0]]
    node = matching.anchor_node(cache.tree, matching.match(cache.tree, TokenKey(PROMPT), LIMIT))
    while node.parent and any(node.cells[component.index].host is None for component in whole):
        node = node.parent
    for boundary in range(LIMIT, anchor + threshold - 1, -1):
        fits = True
        for component, mine in zip(components, known):
            on_host = closed and (component.is_prefix_closed or component is components[0])
            lacking = [
                page
                for page in pages_at(component, boundary)
                if page >= node.end and page not in (mine.host if on_host else mine.readable)
            ]
            n_slots = len(lacking) * (1 if component.is_state else component.slots_per_page)
            assert component.host is not None
            fits &= set(lacking) <= mine.stored and n_slots <= component.host.free
        if fits:
            return boundary
    return anchor


def run(server: Server, key: TokenKey, prefetch: Prefetch | None = None) -> None:
    """Serve a prompt if it fits at all; its reads are compared with the computed data."""
    request = server.cache.begin(key, prefetch=prefetch)
    if prefetch is not None:
        assert request.storage_tokens == prefetch.gained_tokens
    if server.cache.admit(request).admitted:
        server.load_back(request)
        server.prefill(request)
        server.cache.finish(request)
    else:
        server.cache.abort(request)
    assert server.cache.drain()
    server.cache.check_integrity()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
@pytest.mark.parametrize("setup", one_of_each_kind())
@settings(max_examples=2 * settings().max_examples)
@example(seed=747481, lost=0.05, served=0, host_pages=12)
@given(
    seed=st.integers(0, 2**32),
    lost=st.sampled_from([0.0, 0.05, 0.3]),
    served=st.integers(0, len(PROMPT)),
    host_pages=st.sampled_from([6, 12, 18, 64]),
)
def test_a_prefetch_reaches_the_deepest_boundary_that_is_stored_and_fits(
    setup: Setup,
    policy: WritePolicy,
    seed: int,
    lost: float,
    served: int,
    host_pages: int,
) -> None:
    chance = random.Random(seed)
    shelf = shelf_of(setup)
    for stored in list(shelf.stored):
        if chance.random() < lost:
            del shelf.stored[stored]
    sizes: dict[str, Any] = {
        name: {"host_states": max(2, host_pages // 6)}
        for name, options in setup.options.items()
        if "host_states" in options
    }
    cache = open_cache(
        setup, shelf, policy=policy, device_tokens=256, host_tokens=host_pages * PAGE, **sizes
    )
    server = Server(cache)
    try:
        if served:
            run(server, TokenKey(PROMPT[:served]))
            for component in cache.tree.components:
                if chance.random() < 0.5:
                    cache.evict(component.name, chance.randrange(1, 12))
        ledgers = [
            component.host for component in cache.tree.components if component.host is not None
        ]
        empty = not any(ledger.evictable for ledger in ledgers)
        wanted = expected(cache, shelf, 1)
        key = TokenKey(PROMPT)
        prefetch = drained(cache, tier_of(cache).prefetch(key))
        assert tier_of(cache).prefetching.n_in_flight == 0
        reached = matching.match(cache.tree, key, LIMIT).anchor
        if empty:
            assert reached == wanted, prefetch
        assert reached >= prefetch.tokens // PAGE
        if prefetch.gained_tokens:
            assert reached == prefetch.tokens // PAGE
        run(server, key, prefetch)
    finally:
        cache.close()
