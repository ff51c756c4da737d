"""When components are notified of pins."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import Cache, CacheConfig, Span, TokenKey
from kvgraft.packages.registry import load_plugin

from ..mutants.packages import paged


@pytest.mark.rule("I5")
def test_a_checkpoint_takes_the_new_pins_before_it_drops_the_old_ones() -> None:
    told: list[tuple[str, int]] = []
    pinned: list[int] = []

    def acquire(component: Any, query: Any) -> list[Span]:
        told.append(("acquire", query.boundary))
        return [Span(max(0, query.boundary - 5), query.boundary)] if query.boundary else []

    def release(component: Any, segment: list[Span]) -> None:
        told.append(("release", segment[-1].end if segment else 0))
        pinned.append(cache.tree.components[0].device.pinned)

    package = paged(hooks={"acquire_component_lock": acquire, "release_component_lock": release})
    plugin = load_plugin("pins", package.implementation("pins"))
    config = CacheConfig(components={"pins": {}}, page_size=1, device_tokens=32)
    cache = Cache(config, plugins=[plugin])
    request = cache.begin(TokenKey(range(9)))
    assert cache.admit(request).admitted
    for _ in range(2):
        assert cache.allocate(request, 3)
        cache.computed(request, 3)
        assert cache.checkpoint(request)
    assert told == [
        ("acquire", 0),
        ("acquire", 3),
        ("release", 0),
        ("acquire", 6),
        ("release", 3),
    ]
    assert pinned == [3, 5], "the new pins stand while the old ones go"
    cache.abort(request)
    assert told[-1] == ("release", 6)
    cache.close()
