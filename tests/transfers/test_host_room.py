"""Room on HOST under write-back: it gives up what DEVICE has, and admits what is worth it (E5)."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import GuardMode, Tier, TokenKey, WritePolicy
from kvgraft.assembly import PartsFactory, parts_of
from kvgraft.cache import Cache
from kvgraft.config import CacheConfig
from kvgraft_testing.machine.keeping import BY_NAMESPACE

from ..serving.server import Server
from ..serving.setups import SETUPS
from .gates import pages_on

MIRRORED = [name for name in sorted(SETUPS) if name not in ("hisparse", "hisparse+sinks")]
ONE, OTHER, THIRD = (list(range(start, start + 32)) for start in (100, 200, 300))
PAGES = 16
LOW, HIGH = (next(n for n in range(99) if BY_NAMESPACE.rank(n) == rank) for rank in (0, 2))


def by_namespace(config: CacheConfig) -> PartsFactory:
    parts = parts_of(config)
    parts.policy = BY_NAMESPACE.make()
    return parts


def opened(name: str = "full", **options: Any) -> Cache:
    sizes = {"device_tokens": 128, "host_tokens": 256, **options}
    return SETUPS[name].open(policy=WritePolicy.WRITE_BACK, guard=GuardMode.ON, **sizes)


def on_host_only(server: Server, tokens: list[int]) -> None:
    server.serve(tokens)
    server.empty_device()


def copies(cache: Cache) -> int:
    return sum(cache.stats().backups.slots.values())


@pytest.mark.parametrize("name", MIRRORED)
def test_host_gives_up_first_what_device_has_as_well(name: str) -> None:
    with opened(name) as cache:
        server = Server(cache)
        on_host_only(server, ONE)
        on_host_only(server, OTHER)
        kept = {each.name: pages_on(cache, ONE, each.name, Tier.HOST) for each in cache.mounted}
        server.serve([*OTHER, 1, 2])
        for component in cache.tree.components:
            loaded = len(pages_on(cache, OTHER, component.name, Tier.DEVICE))
            cache.evict(component.name, min(1, loaded), Tier.HOST)
            assert pages_on(cache, ONE, component.name, Tier.HOST) == kept[component.name]
        assert server.begin([*OTHER, 1, 2, 3]).device_tokens >= len(OTHER)


def test_a_copy_that_was_given_up_is_made_again_when_its_data_leaves_device() -> None:
    with opened() as cache:
        server = Server(cache)
        on_host_only(server, ONE)
        server.serve([*ONE, 1, 2])
        cache.evict("full", PAGES, Tier.HOST)
        assert pages_on(cache, ONE, "full", Tier.HOST) == []
        before = copies(cache)
        server.empty_device()
        assert copies(cache) == before + PAGES + 1
        assert server.begin([*ONE, 1, 2, 3]).anchor_tokens == len(ONE) + 2


def test_copies_of_data_that_is_to_leave_device_are_not_given_up_first() -> None:
    with opened(device_tokens=68) as cache:
        server = Server(cache)
        on_host_only(server, ONE)
        server.serve(OTHER)
        server.serve([*ONE, 1, 2])
        cache.poll()
        cache.drain()
        (full,) = cache.tree.components
        assert full.clean.n_slots
        assert pages_on(cache, OTHER, "full", Tier.HOST) != []
        cache.evict("full", 1, Tier.HOST)
        assert pages_on(cache, OTHER, "full", Tier.HOST) != []
        assert pages_on(cache, ONE, "full", Tier.HOST) == []


def leave(server: Server, tokens: list[int], namespace: int) -> int:
    """Data of a namespace leaves DEVICE; the tokens of it found on HOST then."""
    key = TokenKey(tokens, namespace=namespace)
    request = server.cache.begin(key)
    assert server.cache.admit(request).admitted
    server.load_back(request)
    server.prefill(request)
    server.cache.finish(request)
    server.empty_device()
    server.cache.drain()
    return found(server.cache, tokens, namespace)


def found(cache: Cache, tokens: list[int], namespace: int) -> int:
    request = cache.begin(TokenKey([*tokens, 1, 2], namespace=namespace))
    cache.abort(request)
    return request.anchor_tokens


def test_host_does_not_admit_data_worth_less_than_its_last_victims() -> None:
    with opened(host_tokens=40, parts=by_namespace) as cache:
        server = Server(cache)
        assert leave(server, ONE, LOW) == len(ONE)
        assert leave(server, OTHER, HIGH) == len(OTHER)
        assert found(cache, ONE, LOW) == 0
        assert leave(server, THIRD, HIGH) == len(THIRD)
        before = copies(cache)
        assert leave(server, ONE, LOW) == 0
        assert copies(cache) == before
        assert found(cache, THIRD, HIGH) == len(THIRD)
        assert leave(server, OTHER, HIGH) == len(OTHER)


def test_with_room_host_admits_everything() -> None:
    with opened(host_tokens=40, parts=by_namespace) as cache:
        server = Server(cache)
        leave(server, ONE, HIGH)
        leave(server, OTHER, HIGH)
        cache.evict("full", PAGES, Tier.HOST)
        assert leave(server, THIRD, LOW) == len(THIRD)


def test_lru_admits_always() -> None:
    with opened(host_tokens=40) as cache:
        server = Server(cache)
        for tokens in (ONE, OTHER, THIRD, ONE):
            assert leave(server, tokens, LOW) == len(tokens)
