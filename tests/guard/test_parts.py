"""A guarded cache is the one that ships: its parts call the plain ones, in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvgraft import Cache, CacheConfig, TokenKey
from kvgraft.assembly import PartsFactory
from kvgraft.config import GuardMode
from kvgraft.optional import load_part
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.leases import Leases
from kvgraft.requests.publishing import Publisher
from kvgraft.requests.request import Request
from kvgraft.transfers import Journal, TransferEngine
from kvgraft.tree.tree import Tree
from kvgraft_guard import GuardedPartsFactory
from kvgraft_storage.tier import StorageTier
from kvgraft_storage.tier.prefetching import Prefetching
from kvgraft_storage.tier.storing import Storing

from ..storage_tier.shelf import AT_ONCE, Shelf, settings, tier_of
from .scene import LONGER, PROMPT, Scene

CALLS: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (Journal, ("submit", "poll", "drain", "settle")),
    (Leases, ("lease",)),
    (Publisher, ("share",)),
    (Prefetching, ("start", "take", "poll", "cancel", "stop")),
    (Storing, ("poll", "stop", "arrived", "leaving")),
    (Tree, ("split", "put", "detach")),
    (Evictor, ("ensure_free",)),
)
"""Calls between the parts of a cache."""

POLLED = ["Prefetching.poll", "Storing.poll"]
"""A poll of the storage tier."""


def recorded(patch: pytest.MonkeyPatch) -> list[str]:
    """A list to which every such call adds its name from now on."""
    heard: list[str] = []

    def hearing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def heard_call(*given: Any, **named: Any) -> Any:
            heard.append(name)
            return function(*given, **named)

        return heard_call

    for owner, names in CALLS:
        for name in names:
            patch.setattr(owner, name, hearing(f"{owner.__name__}.{name}", getattr(owner, name)))
    return heard


def played(mode: GuardMode) -> list[str]:
    """The calls of a few requests over three tiers, in order."""
    with pytest.MonkeyPatch.context() as patch:
        heard = recorded(patch)
        scene = Scene(plain=True, host_tokens=64, storage=settings(), mode=mode)
        tier = tier_of(scene.cache)
        tier.pace = AT_ONCE
        tier.attach(Shelf(synchronous=True))
        scene.cached(PROMPT)
        assert tier.drain(10)
        scene.cache.drain()
        scene.on_host_only(LONGER)
        key = TokenKey([*LONGER, 1])
        prefetch = tier.prefetch(key)
        assert tier.drain(10)
        scene.cache.abort(scene.cache.begin(key, prefetch=prefetch))
        tier.cancel(tier.prefetch(TokenKey(range(500, 540))))
        scene.cache.abort(scene.loaded([*PROMPT[:16], 7, 8, 9, 10]))
        scene.cache.poll()
        scene.close()
        return once_each(heard)


def once_each(heard: list[str]) -> list[str]:
    """Polls while a store is busy count once: how many there are is a matter of time."""
    found: list[str] = []
    for name in heard:
        found.append(name)
        if found[-4:-2] == found[-2:] == POLLED:
            del found[-2:]
    return found


@pytest.mark.plain_build
@pytest.mark.parametrize("mode", [GuardMode.ON, GuardMode.SAMPLED])
def test_the_parts_are_called_in_the_same_order_with_a_guard(mode: GuardMode) -> None:
    plain = played(GuardMode.OFF)
    assert {"Journal.poll", "Prefetching.take", "Storing.poll", "Tree.split"} <= set(plain)
    assert played(mode) == plain


def test_no_attribute_of_a_guarded_part_stands_for_a_method() -> None:
    scene = Scene(host_tokens=64, storage=settings())
    cache, tier = scene.cache, tier_of(scene.cache)
    parts = (cache, cache.evictor, cache.journal, cache.tree, tier)
    for owner in (*parts, tier.client, tier.storing, tier.prefetching):
        assert [name for name in vars(owner) if callable(getattr(type(owner), name, None))] == []
    scene.close()


class Counting(PartsFactory):
    """Hands in an engine, and counts the parts it made."""

    def __init__(self, config: CacheConfig) -> None:
        super().__init__(config)
        self.engines: list[TransferEngine] = []

    def engine(self) -> TransferEngine:
        self.engines.append(super().engine())
        return self.engines[-1]


def test_a_cache_is_made_of_the_parts_that_it_is_given() -> None:
    config = CacheConfig(components={"full": {}}, device_tokens=1024)
    parts = Counting(config)
    with Cache(config, parts=parts) as cache:
        assert [cache.journal.engine] == parts.engines
        assert type(cache) is Cache
        assert cache.guard is None
    config = config.model_copy(update={"guard": GuardMode.ON})
    with Cache(config, parts=GuardedPartsFactory(config)) as cache:
        assert isinstance(cache, Cache)
        assert cache.guard is not None
        cache.drain()
        assert cache.guard.looked_at == 1


class TheirTier(StorageTier):
    """A storage tier that another package brings in the place of ours."""


class TheirRecorder:
    """A recorder that another package brings: its streams are not ours."""

    def __init__(self, tree: Tree, ended: Callable[[], object]) -> None:
        self.tree = tree
        self.ended = ended
        self.n_hits = self.n_checks = 0

    def open(self, limit: int, observer: Callable[[list[Any]], object] | None) -> Any:
        return self

    def hit(self, request: Request, loaded: object) -> None:
        self.n_hits += 1

    def deliver(self) -> None:
        pass

    def check(self) -> None:
        self.n_checks += 1

    def close(self) -> None:
        self.ended()


@pytest.fixture
def their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other packages bring the storage tier and the events."""
    theirs = {"storage": TheirTier, "events": TheirRecorder}
    for module in ("kvgraft.assembly", "kvgraft_guard.parts"):
        monkeypatch.setattr(f"{module}.load_part", lambda name: theirs.get(name) or load_part(name))


@pytest.mark.plain_build
@pytest.mark.usefixtures("their_parts")
@pytest.mark.parametrize("mode", list(GuardMode))
def test_parts_that_other_packages_bring_are_used_with_a_guard_too(mode: GuardMode) -> None:
    scene = Scene(plain=True, host_tokens=64, storage=settings(), mode=mode)
    cache = scene.cache
    tier = tier_of(cache)
    assert isinstance(tier, TheirTier)
    tier.attach(Shelf(synchronous=True))
    stream: Any = cache.events()
    assert type(stream) is TheirRecorder
    scene.cached(PROMPT)
    scene.on_host_only(LONGER)
    key = TokenKey([*LONGER, 1])
    prefetch = tier.prefetch(key)
    assert tier.drain(10)
    cache.abort(cache.begin(key, prefetch=prefetch))
    scene.loaded([*PROMPT[:16], 7, 8, 9, 10])
    assert stream.n_hits
    cache.check_integrity()
    assert stream.n_checks
    stream.close()
    assert cache.recorder is None
    scene.close()
