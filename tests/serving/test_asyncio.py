"""An engine on asyncio awaits load-backs and prefetches; its other tasks run meanwhile."""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from kvgraft import Cache, CacheConfig, LeaseError, Request, TokenKey, TransferError
from kvgraft_testing.stepped import SteppedTransferEngine

from ..storage_tier.shelf import open_cache, settings, stocked, tier_of
from .setups import SETUPS

PROMPT = range(100)
SETTINGS: dict[str, Any] = {
    "page_size": 4,
    "device_tokens": 256,
    "host_tokens": 256,
    "write_policy": "write-through",
    "load": None,
}


class _NoWait(selectors.DefaultSelector):
    """Takes no time to wait: its loop's clock moves on by as much instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class Hurried(asyncio.SelectorEventLoop):
    """A loop with a clock of its own, in which 30 seconds pass at once."""

    def __init__(self) -> None:
        self.selector = _NoWait()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now


def loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    found: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop,
        "hurried": Hurried,
    }
    if find_spec("uvloop") is not None:
        import uvloop  # type: ignore[import-not-found,unused-ignore]

        found["uvloop"] = uvloop.new_event_loop
    return found


def run(main: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Run to the end; no task and no thread is left."""
    threads = threading.active_count()
    try:
        loop.run_until_complete(main)
        assert asyncio.all_tasks(loop) == set()
        assert threading.active_count() <= threads
    finally:
        loop.close()


@pytest.fixture
def engine() -> SteppedTransferEngine:
    return SteppedTransferEngine()


@pytest.fixture
def cache(engine: SteppedTransferEngine) -> Iterator[Cache]:
    """A prompt is on HOST alone; copies run when the test says so."""
    with Cache(CacheConfig(components={"full": {}}, **SETTINGS), transfers=engine) as cache:
        request = cache.begin(TokenKey(PROMPT))
        assert cache.admit(request).admitted
        assert cache.allocate(request, len(PROMPT))
        cache.computed(request, len(PROMPT))
        cache.finish(request)
        engine.run_all()
        cache.poll()
        cache.evict("full", 25)
        yield cache
        engine.run_all()
        cache.poll()
        cache.check_integrity()


def loading(cache: Cache) -> Request:
    request = cache.begin(TokenKey(PROMPT))
    assert cache.admit(request).admitted
    cache.load_back(request)
    assert not request.ready
    return request


@pytest.mark.parametrize("loop", loops().values(), ids=loops())
def test_several_await_one_transfer_while_other_tasks_run(
    cache: Cache,
    engine: SteppedTransferEngine,
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def main() -> None:
        requests = [loading(cache) for _ in range(3)]
        waiting = [asyncio.ensure_future(cache.ready(each)) for each in requests]
        for _ in range(5):
            await asyncio.sleep(0)
            assert not any(each.done() for each in waiting)
        engine.run_all()
        await asyncio.gather(*waiting)
        for request in requests:
            assert request.ready
            assert cache.allocate(request, 4)
            await cache.ready(request)  # nothing is under way any more
            cache.abort(request)

    run(main(), loop())


def test_a_failed_load_back_has_ended_too(cache: Cache, engine: SteppedTransferEngine) -> None:
    async def main() -> None:
        request = loading(cache)
        engine.fail()
        await cache.ready(request)
        assert request.load_failed
        cache.restart(request)
        with pytest.raises(LeaseError, match="request is leased, this call needs it admitted"):
            await cache.ready(request)
        cache.abort(request)

    run(main(), Hurried())


def test_copies_that_the_loop_polled_itself_are_seen(
    cache: Cache, engine: SteppedTransferEngine
) -> None:
    """Also by a wait whose own polls take in nothing, as after a poll that raised."""

    async def main() -> None:
        request = loading(cache)
        waiting = asyncio.ensure_future(cache.ready(request))
        await asyncio.sleep(0)
        engine.run_all()
        assert cache.poll() == 1
        await waiting
        assert request.ready
        cache.abort(request)

    run(main(), Hurried())


def test_a_cancelled_wait_changes_nothing(cache: Cache, engine: SteppedTransferEngine) -> None:
    async def main() -> None:
        request, other = loading(cache), loading(cache)
        waiting = [asyncio.ensure_future(cache.ready(each)) for each in (request, other)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(cache.ready(request), 1.0)
        engine.run_all()
        await waiting[1]
        await cache.ready(request)
        assert request.ready
        cache.abort(request)
        cache.abort(other)

    run(main(), Hurried())


def test_a_copy_that_does_not_end_is_reported_and_may_be_awaited_again(
    cache: Cache, engine: SteppedTransferEngine
) -> None:
    async def main() -> None:
        request = loading(cache)
        before = asyncio.get_running_loop().time()
        with pytest.raises(TransferError, match=r"load-back has not ended in 30 s; await it again"):
            await cache.ready(request)
        assert asyncio.get_running_loop().time() - before == pytest.approx(30)
        engine.run_all()
        await cache.ready(request)
        cache.abort(request)

    run(main(), Hurried())


def test_a_request_that_ends_while_it_is_awaited_is_named(cache: Cache) -> None:
    async def main() -> None:
        request = loading(cache)
        waiting = asyncio.ensure_future(cache.ready(request))
        await asyncio.sleep(0)
        cache.abort(request)
        with pytest.raises(LeaseError, match="request is closed"):
            await waiting

    run(main(), Hurried())


def test_a_load_back_that_has_not_started_and_other_objects_are_refused(cache: Cache) -> None:
    async def main() -> None:
        request = cache.begin(TokenKey(PROMPT))
        with pytest.raises(LeaseError, match="request is leased"):
            await cache.ready(request)
        assert cache.admit(request).admitted
        with pytest.raises(LeaseError, match="ready before load_back"):
            await cache.ready(request)
        with pytest.raises(LeaseError, match="is no request"):
            await cache.ready("request")  # type: ignore[arg-type]
        cache.abort(request)

    run(main(), Hurried())


def test_a_prefetch_is_awaited_as_well() -> None:
    setup, prompt = SETUPS["full"], list(PROMPT[:33])
    shelf = stocked(setup, prompt)
    with open_cache(setup, shelf, settings(), device_tokens=256, host_tokens=512) as cache:

        async def main() -> None:
            shelf.gate.clear()
            key = TokenKey(prompt)
            prefetch = tier_of(cache).prefetch(key)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(cache.ready(prefetch), 0.001)
            shelf.gate.set()
            await cache.ready(prefetch)
            assert prefetch.ready
            request = cache.begin(key, prefetch=prefetch)
            assert request.storage_tokens > 0
            cache.abort(request)
            with pytest.raises(LeaseError, match="is no prefetch"):
                await cache.ready(object())  # type: ignore[arg-type]

        asyncio.run(main())
