"""HOST slots that prefetches take count for their tenant."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import TokenKey
from kvgraft.types import Tier
from kvgraft_storage.tier import Prefetch

from ..storage_tier.shelf import AT_ONCE, Shelf, settings, tier_of, until
from .engine import PAGE, Player, held

PROMPT = range(12 * PAGE + 1)


@pytest.fixture(scope="module")
def stored() -> Shelf:
    """Twelve pages of the tenant `a`."""
    shelf = Shelf()
    player = opened(shelf, {"a": {"namespaces": ["a"]}})
    player.serve("a", PROMPT)
    until(lambda: not tier_of(player.cache).n_in_flight, player.cache)
    player.cache.close()
    return shelf


@pytest.fixture
def shelf(stored: Shelf) -> Shelf:
    return stored.copy()


def opened(shelf: Shelf, tenants: dict[str, dict[str, Any]]) -> Player:
    player = Player(("full",), tenants, storage=settings(), device_tokens=64 * PAGE)
    tier = tier_of(player.cache)
    tier.pace = AT_ONCE
    tier.attach(shelf)
    return player


def arrived(player: Player, prefetch: Prefetch) -> None:
    """The prefetch ends; all books are right meanwhile."""

    def has_ended() -> bool:
        player.cache.check_integrity()
        return prefetch.ended

    until(has_ended, player.cache)


def test_a_prefetch_takes_what_others_borrowed_and_holds_it_for_its_tenant(shelf: Shelf) -> None:
    player = opened(shelf, {"a": {"namespaces": ["a"], "guarantee": 0.5}})
    for number in range(1, 5):
        player.serve("b", range(1_000 * number, 1_000 * number + 7 * PAGE + 1))
        until(lambda: not tier_of(player.cache).n_in_flight, player.cache)
    assert held(player.cache)["full", Tier.HOST, 1] == 28
    prefetch = tier_of(player.cache).prefetch(TokenKey(PROMPT, "a"))
    arrived(player, prefetch)
    share = player.cache.stats().tenants["a"].host["full"]
    assert share.used == held(player.cache)["full", Tier.HOST, 0] == 12
    assert held(player.cache)["full", Tier.HOST, 1] == 14, "two nodes went, of the 28 it borrowed"
    assert player.serve("a", PROMPT) == 12 * PAGE


def test_a_prefetch_shrinks_to_its_tenants_limit(shelf: Shelf) -> None:
    player = opened(shelf, {"a": {"namespaces": ["a"], "host_limit": 0.25}})
    prefetch = tier_of(player.cache).prefetch(TokenKey(PROMPT, "a"))
    arrived(player, prefetch)
    assert held(player.cache)["full", Tier.HOST, 0] == 8
    assert player.serve("a", PROMPT) == 8 * PAGE
