"""Events tell exactly what is where, and cost the cache nothing when a reader fails (V1 to V3)."""

from __future__ import annotations

import logging
import random
from threading import Thread
from typing import Any

import pytest

from kvgraft import ConfigError, GuardMode, IntegrityError, LeaseError, TokenKey
from kvgraft.cache import Cache
from kvgraft.stats import CacheStats, SlotHits
from kvgraft.types import Tier
from kvgraft_observe.events import Cleared, Event, Evicted, Hit, Moved, Residency, Stored
from kvgraft_storage.settings import PrefetchPolicy

from ..serving.server import Server, tree_dump
from ..serving.setups import SETUPS, Setup, installed
from ..storage_tier.shelf import drained, open_cache, settings, stocked, tier_of

PROMPT = list(range(100, 133))


def now(cache: Cache) -> Residency:
    """The residency now, as a reader who begins gets it."""
    residency, stream = Residency(), cache.events()
    residency.apply(stream.take())
    stream.close()
    return residency


def play(cache: Cache, residency: Residency | None = None) -> None:
    """Requests that share prefixes, in small pools; what was told is compared after each."""
    server, draw = Server(cache), random.Random(3)
    stream = None if residency is None else cache.events()
    for number in range(14):
        prompt = [draw.choice((1, 2)) for _ in range(draw.randint(1, 20))]
        server.serve(prompt, decode=draw.randint(0, 5), chunk=4)
        if number % 6 == 4:
            server.empty_device()
        if residency is not None and stream is not None:
            residency.apply(stream.take())
            assert residency.pages == now(cache).pages


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_all_events_together_give_the_residency_and_change_no_decision(setup: Setup) -> None:
    seen: list[tuple[CacheStats, object]] = []
    for residency in (None, Residency()):
        with setup.open(device_tokens=48, host_tokens=64) as cache:
            play(cache, residency)
            seen.append((cache.stats(), tree_dump(cache)))
    assert seen[0] == seen[1]


def test_a_guarded_cache_tells_the_same() -> None:
    with SETUPS["full+swa+mamba"].open(
        device_tokens=48, host_tokens=64, guard=GuardMode.ON
    ) as cache:
        play(cache, Residency())
        cache.check_integrity()


def test_data_from_storage_comes_as_moved_and_goes_as_evicted() -> None:
    setup = installed("full", "mamba")
    shelf = stocked(setup, PROMPT)
    given = settings(prefetch=PrefetchPolicy.WAIT_COMPLETE)
    with open_cache(setup, shelf, given, device_tokens=256, host_tokens=512) as cache:
        stream, key = cache.events(), TokenKey(PROMPT)
        assert stream.take() == [Cleared(0)]
        prefetch = drained(cache, tier_of(cache).prefetch(key))
        came = [each for each in stream.take() if isinstance(each, Moved)]
        assert {(each.component, each.tier, each.source) for each in came} == {
            ("full", Tier.HOST, Tier.STORAGE),
            ("mamba", Tier.HOST, Tier.STORAGE),
        }
        request = cache.begin(key, prefetch=prefetch)
        assert cache.admit(request).admitted
        (hit,) = (each for each in stream.take() if isinstance(each, Hit))
        assert (hit.prompt, hit.device, hit.host, hit.storage) == (33, 0, 0, 32)
        assert hit.slots == {"full": SlotHits(0, 0, 16), "mamba": SlotHits(0, 0, 1)}
        cache.abort(request)
        assert cache.evict("full", 512, Tier.HOST) > 0
        gone = [each for each in stream.take() if isinstance(each, Evicted)]
        assert {each.tier for each in gone} == {Tier.HOST}
        assert sum(len(each.pages) for each in gone if each.component == "full") == 16


def hashes(events: list[Event]) -> set[bytes]:
    return {name for each in events if isinstance(each, Stored) for name in each.pages.hashes}


def test_a_page_has_one_name_in_every_cache_and_another_in_every_namespace() -> None:
    found = []
    for namespace, prompts in ((None, (40, 20)), (None, (20, 40)), ("tenant", (40,))):
        with installed("full").open() as cache:
            stream = cache.events()
            for n_tokens in prompts:
                request = cache.begin(TokenKey(range(n_tokens), namespace))
                assert cache.admit(request).admitted
                chunk = cache.next_chunk(request)
                assert cache.allocate(request, chunk)
                cache.computed(request, chunk)
                cache.finish(request)
            found.append(hashes(stream.take()))
    assert found[0] == found[1]
    assert len(found[0]) == 20
    assert not found[0] & found[2]


def test_an_observer_that_raises_begins_again_and_requests_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told: list[list[Event]] = []

    def observer(events: list[Event]) -> None:
        told.append(events)
        if len(told) == 2:
            raise RuntimeError("no route\nto host")

    with installed("full").open() as cache, caplog.at_level(logging.WARNING, "kvgraft"):
        stream = cache.observe(observer)
        for prompt in ([1] * 8, [2] * 8, [3] * 8, [4] * 8):
            Server(cache).serve(prompt)
        cache.poll()
        assert "RuntimeError: no route to host" in caplog.text
        assert stream.failures == 1
        assert stream.lost >= len(told[1])
        assert told[2][0] == Cleared(stream.lost)
        residency = Residency()
        for events in told[2:]:
            residency.apply(events)
        assert residency.pages == now(cache).pages


def test_a_stream_begins_again_when_its_reader_asks() -> None:
    told: list[Event] = []
    with installed("full").open() as cache:
        stream = cache.observe(told.extend)
        Server(cache).serve(PROMPT)
        cache.poll()
        Server(cache).serve([1] * 8)
        waiting = len(stream)
        assert waiting > 0
        told.clear()
        asking = Thread(target=stream.begin_again)
        asking.start()
        asking.join()
        cache.poll()
        assert told[0] == Cleared(waiting)
        residency = Residency()
        residency.apply(told)
        assert residency.pages == now(cache).pages
        told.clear()
        Server(cache).serve([2] * 8)
        cache.poll()
        assert Cleared not in map(type, told)
        residency.apply(told)
        assert residency.pages == now(cache).pages


def test_a_reader_that_lags_begins_again_with_a_snapshot() -> None:
    with installed("full").open() as cache:
        residency, stream = Residency(), cache.events(limit=4)
        residency.apply(stream.take())
        for first in range(0, 60, 10):
            Server(cache).serve(list(range(first, first + 9)))
        assert stream.lost > 4
        events = stream.take()
        assert events[0] == Cleared(stream.lost)
        residency.apply(events)
        assert residency.pages == now(cache).pages
        assert stream.take() == []


def listens(cache: Cache) -> bool:
    return bool(cache.tree.observers)


def test_nobody_is_notified_once_all_streams_are_closed() -> None:
    with installed("full").open() as cache:
        streams = [cache.events(), cache.events()]
        assert listens(cache)
        for stream in streams:
            stream.close()
            stream.close()
        assert not listens(cache)
        Server(cache).serve(PROMPT)
        assert streams[0].take() == []
        with pytest.raises(ConfigError, match="events: limit"):
            cache.events(limit=0)


async def told_later(events: list[Event]) -> None:
    raise AssertionError(events)


@pytest.mark.parametrize("observer", [None, 3, told_later])
def test_an_observer_that_nothing_can_call_is_refused(observer: Any) -> None:
    with installed("full").open() as cache:
        with pytest.raises(ConfigError, match=r"observe: observer .*; give a function"):
            cache.observe(observer)
        assert not listens(cache)


def test_a_closed_cache_opens_no_stream() -> None:
    with installed("full").open() as cache:
        pass
    with pytest.raises(LeaseError, match="the cache is closed; open another"):
        cache.events()
    with pytest.raises(LeaseError, match="the cache is closed; open another"):
        cache.observe(print)


def test_pages_are_hashed_alike_on_several_threads() -> None:
    with installed("full").open(device_tokens=256) as cache:
        stream = cache.events()
        for end in (40, 90, 120):
            Server(cache).serve(list(range(end)))
        events, found = stream.take(), list[set[bytes]]()
        readers = [Thread(target=lambda: found.append(hashes(events))) for _ in range(4)]
        for each in readers:
            each.start()
        for each in readers:
            each.join()
        assert found == [now(cache).pages["full", Tier.DEVICE]] * 4


def test_pages_that_events_would_name_wrongly_are_found() -> None:
    with installed("full").open() as cache:
        stream = cache.events()
        Server(cache).serve(PROMPT)
        cache.check_integrity()
        node = next(iter(cache.tree.nodes()))
        cache.tree.observers, unheard = (), cache.tree.observers
        cache.tree.split(node, 3)
        cache.tree.observers = unheard
        with pytest.raises(IntegrityError, match="events know pages of 1 nodes, the tree has 2"):
            cache.check_integrity()
        stream.close()
        cache.check_integrity()


def test_an_event_that_does_not_fit_is_refused() -> None:
    with installed("full").open() as cache:
        stream, residency = cache.events(), Residency()
        Server(cache).serve(PROMPT)
        events = stream.take()
        residency.apply(events)
        with pytest.raises(IntegrityError, match="there already"):
            residency.apply(events[1:])
