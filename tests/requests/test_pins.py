"""Pinned prefixes stay while there is pressure, within a bound, and break no promise (K6)."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraft import BudgetError, CacheConfig, ConfigError, GuardMode, LeaseError, TokenKey
from kvgraft.cache import Cache
from kvgraft.types import Tier
from kvgraft_retention.stats import PinStats

from ..serving.server import Server, ledgers, slots_on
from ..serving.setups import SETUPS, Setup

SYSTEM = list(range(100, 116))


def opened(**settings: Any) -> Cache:
    given: dict[str, Any] = {"device_tokens": 128, "host_tokens": 256, **settings}
    config = CacheConfig(
        components={"full": {}}, page_size=2, load=None, guard=GuardMode.ON, **given
    )
    return Cache(config)


def resumes(cache: Cache, tokens: list[int]) -> int:
    """How many tokens a request for them would resume from."""
    anchor: int = cache.explain(TokenKey([*tokens, 1])).anchor
    return anchor


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_a_pinned_prefix_stays_until_it_is_unpinned(setup: Setup) -> None:
    with setup.open(guard=GuardMode.ON, device_tokens=256, host_tokens=512) as cache:
        server = Server(cache)
        fresh = ledgers(cache)
        server.serve(SYSTEM)
        cached = resumes(cache, SYSTEM)
        pin = cache.pin(TokenKey(SYSTEM), owner="router")
        assert (pin.tokens, pin.asked_tokens) == (cached, 16)
        for component in cache.tree.components:
            for tier in (Tier.DEVICE, Tier.HOST):
                cache.evict(component.name, component.device.capacity * 2, tier)
        assert resumes(cache, SYSTEM) == cached
        server.serve([*SYSTEM, 7, 8, 9])  # reads the pinned bytes
        cache.unpin(pin)
        for component in cache.tree.components:
            for tier in (Tier.DEVICE, Tier.HOST):
                cache.evict(component.name, component.device.capacity * 2, tier)
        assert ledgers(cache) == fresh
        cache.check_integrity()


def test_a_prefix_on_host_alone_stays_there_and_then_on_device() -> None:
    with opened() as cache:
        server = Server(cache)
        server.serve(SYSTEM)
        server.empty_device()
        pin = cache.pin(TokenKey(SYSTEM), owner="router")
        assert (pin.tokens, pin.device_tokens) == (16, 0)
        cache.evict("full", 256, Tier.HOST)
        assert resumes(cache, SYSTEM) == 16
        server.serve([*SYSTEM, 1])
        server.empty_device()
        assert None not in slots_on(cache, SYSTEM, "full", Tier.DEVICE)


def test_the_part_that_is_cached_is_pinned_and_no_more() -> None:
    with opened() as cache:
        server = Server(cache)
        nothing = cache.pin(TokenKey(SYSTEM), owner="router")
        assert (nothing.tokens, nothing.slots) != (16, {})
        assert not any(nothing.slots.values())
        server.serve(SYSTEM[:8])
        part = cache.pin(TokenKey([*SYSTEM, 1]), owner="router")
        assert (part.tokens, part.asked_tokens) == (8, 16)
        server.serve(SYSTEM)
        assert cache.pin(TokenKey(SYSTEM), owner="router", max_tokens=13).tokens == 12
        server.empty_device()
        assert None in slots_on(cache, SYSTEM, "full", Tier.DEVICE)


def test_pins_count_by_owner_and_stay_within_their_share() -> None:
    other = list(range(200, 218))
    with opened(pin_share=0.25) as cache:
        server = Server(cache)
        for prefix in (SYSTEM, other):
            server.serve(prefix)
        pins = [
            cache.pin(TokenKey(prefix), owner=owner)
            for prefix, owner in ((SYSTEM, "a"), (other[:16], "b"))
        ]
        assert cache.stats().pins == {
            owner: PinStats(1, 16, {"full": 8}, {"full": 0}) for owner in ("a", "b")
        }
        said = r"'full' device pool: held\(16\) \+ needed\(1\) > bound\(16\), 0.25 of 64 slots"
        books = ledgers(cache)
        with pytest.raises(BudgetError, match=said):
            cache.pin(TokenKey(other), owner="c")
        assert ledgers(cache) == books
        assert cache.unpin_all("a") == 1
        assert cache.unpin_all("a") == 0
        cache.unpin(cache.pin(TokenKey(other), owner="c"))
        cache.unpin(pins[1])
        assert not cache.stats().pins
        with pytest.raises(LeaseError, match="was unpinned before"):
            cache.unpin(pins[1])
        with pytest.raises(LeaseError, match="was unpinned before"):
            cache.unpin(pins[0])


@pytest.mark.parametrize("name", ["full+swa+mamba", "hisparse"])
def test_pages_that_several_pins_hold_count_once(name: str) -> None:
    with SETUPS[name].open(guard=GuardMode.ON, device_tokens=256, host_tokens=512) as cache:
        server = Server(cache)
        server.serve(SYSTEM)
        pools = [component.devices[0] for component in cache.tree.components]
        pins = [cache.pin(TokenKey(SYSTEM), owner="a")]
        held = [cache.pins.held(pool) for pool in pools]
        assert held == [pins[0].slots[pool] for pool in pools]
        server.serve([*SYSTEM[:10], 1, 2, 3, 4])  # cuts what is pinned
        pins += [cache.pin(TokenKey(SYSTEM), owner=owner) for owner in "bcdefgh"]
        assert [cache.pins.held(pool) for pool in pools] == held
        cache.unpin(pins.pop(0))
        assert [cache.pins.held(pool) for pool in pools] == held
        for pin in pins:
            cache.unpin(pin)
        assert not any(cache.pins.held(pool) for pool in pools)


def test_a_pin_takes_no_promised_slot() -> None:
    with opened(device_tokens=64, pin_share=1.0) as cache:
        server = Server(cache)
        server.serve(SYSTEM)
        running = server.start(list(range(200, 242)), reserve=6)
        books = ledgers(cache)
        with pytest.raises(BudgetError, match="promised in part to admitted requests"):
            cache.pin(TokenKey(SYSTEM), owner="router")
        assert ledgers(cache) == books
        server.prefill(running)
        server.decode(running, 6)
        cache.finish(running)


def test_a_request_that_pins_leave_no_room_for_is_told_so() -> None:
    with opened(device_tokens=32, host_tokens=0, pin_share=1.0) as cache:
        server = Server(cache)
        server.serve(SYSTEM)
        pin = cache.pin(TokenKey(SYSTEM), owner="router")
        request = server.begin(list(range(200, 220)))
        decision = cache.admit(request)
        assert not decision.admitted
        assert str(decision).endswith("waits for pinned prefixes: 1")
        cache.unpin(pin)
        assert cache.admit(request).admitted


def test_clearing_ends_the_pins_of_a_namespace() -> None:
    with opened() as cache:
        Server(cache).serve(SYSTEM)
        pin = cache.pin(TokenKey(SYSTEM), owner="router")
        assert cache.clear("tenant").pins == 0
        assert cache.stats().pins
        told = cache.clear(None)
        assert (told.pins, told.held_device) == (1, {"full": 0})
        assert pin.cleared
        assert not cache.tree.n_nodes
        cache.unpin(pin)
        assert cache.unpin_all("router") == 0


def test_bad_input_is_refused() -> None:
    with opened() as cache:
        for owner in ("", None):
            with pytest.raises(ConfigError, match="give a name, such as 'router'"):
                cache.pin(TokenKey(SYSTEM), owner=owner)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="pin: max_tokens -1; give a whole number, 0 or more"):
            cache.pin(TokenKey(SYSTEM), owner="a", max_tokens=-1)
        with pytest.raises(LeaseError, match="is no pin of this cache"):
            cache.unpin("a")
    with pytest.raises(LeaseError, match="the cache is closed; open another"):
        cache.pin(TokenKey(SYSTEM), owner="a")
