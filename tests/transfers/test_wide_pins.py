"""A component that pins more than its reach has that loaded back as well, page for page."""

from __future__ import annotations

from kvgraft import Cache, CacheConfig, Span, TokenKey, WritePolicy
from kvgraft.packages.registry import load_plugin

from ..mutants.packages import paged


def test_a_load_back_of_a_pin_that_cuts_a_node_reserves_the_pages_it_fills() -> None:
    package = paged(
        hooks={
            "acquire_component_lock": lambda component, query: (
                [Span(max(0, query.boundary - 6), query.boundary)] if query.boundary else []
            ),
            "release_component_lock": lambda component, segment: None,
        }
    )
    config = CacheConfig(
        components={"wide": {}},
        page_size=1,
        device_tokens=9,
        host_tokens=20,
        load=None,
        write_policy=WritePolicy.WRITE_BACK,
    )
    plugin = load_plugin("wide", package.implementation("wide"))
    cache = Cache(config, plugins=[plugin])
    key = TokenKey([2, 2])
    for turn in ([], [1, 2, 1, 1]):
        key.extend(turn)
        request = cache.begin(key)
        assert cache.admit(request).admitted
        n_tokens = cache.next_chunk(request)
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
        cache.finish(request)
    component = cache.tree.by_name["wide"]
    assert cache.evict("wide", 9)
    key.extend([2])
    request = cache.begin(key)
    assert cache.admit(request).admitted
    wanted = sum(part.host_slots for part in request.components)
    cache.load_back(request)
    for node in cache.tree.nodes():
        incoming = node.cells[component.index].incoming
        assert incoming is None or len(incoming.slots) == 4 * component.n_slots(node)
    assert component.device.in_flight == wanted
    assert cache.drain()
    assert request.ready
    assert not request.load_failed
    cache.check_integrity()
    assert cache.allocate(request, 1)
    cache.abort(request)
    cache.check_integrity()
