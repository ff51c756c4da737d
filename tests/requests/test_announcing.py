"""Announced data leaves after other data, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from kvgraft import CacheConfig, ConfigError, GuardMode, LeaseError, TokenKey
from kvgraft.cache import Cache
from kvgraft.types import Tier
from kvgraft_retention import announcing
from kvgraft_retention.announcing import Announced

from ..serving import life

POLICIES = ("lru", "density")
WRITE = ("write-through", "write-back")


def opened(policy: str = "lru", components: tuple[str, ...] = ("full",), **settings: Any) -> Cache:
    options = {"swa": {"window": 4}}
    given = {"device_tokens": 64, "host_tokens": 0, **settings}
    config = CacheConfig(
        components={name: options.get(name, {}) for name in components},
        page_size=2,
        load=None,
        policy=policy,
        guard=GuardMode.ON,
        payload=False,
        **given,
    )
    return Cache(config)


def prompt(number: int, n_tokens: int = 9) -> list[int]:
    return list(range(number * 100, number * 100 + n_tokens))


def found(cache: Cache, number: int, namespace: object = None) -> int:
    """Tokens that a request would resume from."""
    request = cache.begin(TokenKey(prompt(number), namespace))
    tokens = request.anchor_tokens
    cache.abort(request)
    return tokens


def serve(cache: Cache, *numbers: int) -> None:
    for number in numbers:
        life.serve(cache, TokenKey(prompt(number)))
        cache.drain()


@pytest.mark.parametrize("policy", POLICIES)
def test_announced_data_leaves_after_data_that_was_used_later(policy: str) -> None:
    with opened(policy) as cache:
        serve(cache, *range(6))
        waiting = cache.announce(TokenKey(prompt(0)))
        assert waiting.tokens == 8
        serve(cache, *range(6, 12))
        assert found(cache, 0) == 8
        assert found(cache, 1) == 0
        cache.check_integrity()
        cache.evict("full", 64)
        assert found(cache, 0) == 0, "an order, no pin"
        cache.check_integrity()


def test_withdrawn_data_leaves_in_its_turn() -> None:
    with opened() as cache:
        serve(cache, *range(6))
        waiting = cache.announce(TokenKey(prompt(0)))
        waiting.withdraw()
        waiting.withdraw()
        order = cache.tree.component("full").device.queue.first_order
        cache.announce(TokenKey(prompt(1))).withdraw()
        assert cache.tree.component("full").device.queue.first_order is order, (
            "what it learnt stays"
        )
        serve(cache, *range(6, 12))
        assert found(cache, 0) == 0
        cache.check_integrity()


def test_data_of_the_last_place_leaves_first() -> None:
    with opened() as cache:
        serve(cache, *range(3))
        cache.announce(TokenKey(prompt(1)), place=7)
        cache.announce(TokenKey(prompt(0)))
        retracted = cache.announce(TokenKey(prompt(2)), place=3)
        for gone, kept in ((0, (1, 2)), (1, (2,))):
            cache.evict("full", 4)
            assert found(cache, gone) == 0
            assert [found(cache, each) for each in kept] == [8] * len(kept)
        retracted.withdraw()


def test_data_that_two_announce_stays_until_both_are_withdrawn() -> None:
    with opened() as cache:
        serve(cache, 0, 1)
        first, second = (cache.announce(TokenKey(prompt(0))) for _ in range(2))
        first.withdraw()
        cache.evict("full", 4)
        assert found(cache, 0) == 8
        second.withdraw()
        serve(cache, 2)
        cache.evict("full", 4)
        assert found(cache, 0) == 0


@pytest.mark.parametrize("write", WRITE)
def test_host_and_the_clean_reserve_keep_announced_data_too(write: str) -> None:
    with opened(host_tokens=32, write_policy=write) as cache:
        serve(cache, 0)
        for number in range(1, 12):
            serve(cache, number)
            if number == 2:
                cache.announce(TokenKey(prompt(0)))
        assert found(cache, 0) == 8
        while cache.evict("full", 4):
            cache.drain()  # else copies under way fill HOST
        host = cache.tree.component("full").host
        assert host is not None
        cache.evict("full", host.capacity - host.free - 4, Tier.HOST)
        assert found(cache, 0) == 8
        cache.check_integrity()


def test_split_prefix_stays_announced_in_both_parts() -> None:
    with opened() as cache:
        serve(cache, 0)
        waiting = cache.announce(TokenKey(prompt(0)))
        branch = [*prompt(0)[:4], *prompt(9)]
        life.serve(cache, TokenKey(branch))
        device = cache.tree.component("full").device
        cache.evict("full", device.capacity - device.free - 2)
        serve(cache, *range(1, 12))
        assert found(cache, 0) == 4
        waiting.withdraw()
        announced = next(each for each in cache.tree.observers if isinstance(each, Announced))
        assert not announced._places
        serve(cache, *range(12, 24))
        assert found(cache, 0) == 0
        cache.check_integrity()


def test_clear_forgets_announcements_and_other_namespaces_keep_theirs() -> None:
    with opened() as cache:
        for namespace in ("goes", "stays"):
            life.serve(cache, TokenKey(prompt(0), namespace))
        running = cache.begin(TokenKey(prompt(0), "goes"))
        for namespace in ("goes", "stays"):
            cache.announce(TokenKey(prompt(0), namespace))
        cache.clear("goes")
        announced = next(each for each in cache.tree.observers if isinstance(each, Announced))
        assert len(announced) == 1
        cache.abort(running)
        serve(cache, *range(1, 12))
        assert found(cache, 0, "stays") == 8
        cache.check_integrity()


def test_room_is_made_from_announced_data_when_no_other_is_left() -> None:
    with opened() as cache:
        serve(cache, *range(8))
        for number in range(8):
            cache.announce(TokenKey(prompt(number)))
        life.serve(cache, TokenKey(range(1000, 1060)))
        assert cache.stats().requests.running == 0
        cache.check_integrity()


def test_more_announcements_than_the_bound_announce_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announcing, "MOST_ANNOUNCED", 2)
    with opened() as cache:
        serve(cache, *range(4))
        held = [cache.announce(TokenKey(prompt(each))) for each in range(4)]
        cache.evict("full", 8)
        assert [found(cache, each) for each in range(4)] == [8, 8, 0, 0]
        for each in held:
            each.withdraw()


def test_announcing_an_unknown_prefix_leaves_no_trace() -> None:
    with opened() as cache:
        assert cache.announce(TokenKey(prompt(0), "nobody")).tokens == 0
        assert not cache.tree.roots
        cache.check_integrity()


@pytest.mark.rule("D1")
def test_withdrawn_data_is_offered_in_the_order_of_its_prefix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Addresses of nodes have no part in it: ranks decide alike."""
    with opened(device_tokens=512) as cache:
        text = list(range(400))
        for n_tokens in range(40, 400, 8):  # a chain of many nodes, of which each has a sibling
            life.serve(cache, TokenKey([*text[:n_tokens], 1000 + n_tokens, 2, 3]))
        waiting = cache.announce(TokenKey(text))
        changed: list[int] = []
        change = Announced._change

        def noted(self: Announced, component: Any, node: Any, places: Any) -> None:
            changed.append(node.start)
            change(self, component, node, places)

        monkeypatch.setattr(Announced, "_change", noted)
        waiting.withdraw()
        assert len(changed) > 20
        assert changed == sorted(changed, reverse=changed[0] > changed[-1])


def test_closed_cache_and_no_key_are_refused() -> None:
    cache = opened()
    with pytest.raises(ConfigError, match="TokenKey"):
        cache.announce([1, 2])  # type: ignore[arg-type]
    cache.close()
    with pytest.raises(LeaseError, match="the cache is closed"):
        cache.announce(TokenKey(prompt(0)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("components", [("full",), ("full", "swa", "mamba")])
@pytest.mark.parametrize("write", WRITE)
def test_any_order_of_announcing_serving_clearing_and_evicting(
    policy: str, components: tuple[str, ...], write: str
) -> None:
    draw = random.Random(7)
    with opened(policy, components, host_tokens=48, write_policy=write) as cache:
        held = []
        for step in range(150):
            number = draw.randrange(9)
            key = TokenKey([*prompt(number, draw.choice((5, 9))), draw.randrange(3)])
            act = draw.random()
            if act < 0.35:
                held.append(cache.announce(key))
            elif act < 0.5 and held:
                held.pop(draw.randrange(len(held))).withdraw()
            elif act < 0.53:
                cache.clear()
            elif act < 0.6:
                cache.evict("full", draw.randrange(1, 9), draw.choice((Tier.DEVICE, Tier.HOST)))
            else:
                life.serve(cache, key)
            cache.poll()
            if step % 10 == 0:
                cache.check_integrity()
        for each in held:
            each.withdraw()
        announced = next(each for each in cache.tree.observers if isinstance(each, Announced))
        assert not announced._places
        assert not len(announced)
        cache.check_integrity()
