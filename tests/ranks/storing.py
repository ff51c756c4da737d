"""Calls of a rank's storage tier that must go well on all ranks, or on none (D3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvgraft import Cache, TokenKey
from kvgraft.errors import KvgraftError
from kvgraft_storage import StorageTicket, open_storage

from .playing import PAGE

__all__ = ["storage_calls"]

PROMPT = range(40 * PAGE)


def storage_calls(settings: dict[str, Any], group: Any, folder: Path) -> dict[str, Any]:
    """Attach, save, load, detach and clear; what comes of each."""
    rank = group.rank()
    told: dict[str, Any] = {}
    url = f"file:{folder / 'calls'}?capacity=64MiB"
    (folder / "calls").mkdir(exist_ok=True)
    snapshot = folder / f"{rank}.snapshot"
    with Cache.open(["full"], ranks=group, **settings) as cache:
        tier: Any = cache.storage
        told["sharding"] = tier.fingerprint.sharding
        told["attach"] = _error(lambda: tier.attach(open_storage(url) if rank == 0 else None))
        told["attached"] = tier.client.attached
        tier.attach(open_storage(url))
        _serve(cache)
        told["drained"] = cache.drain()
        told["saved"] = tier.save(snapshot)
        awaited: Any = None
        told["ready"] = _error(lambda: asyncio.run(cache.ready(awaited)))
    with Cache.open(["full"], ranks=group, **settings) as cache:
        tier = cache.storage
        tier.attach(open_storage(url))
        damaged = folder / f"{rank}.damaged"
        damaged.write_bytes(snapshot.read_bytes()[: None if rank == 0 else 50])
        told["damaged"] = _error(lambda: tier.load(damaged))
        restoring = tier.load(snapshot)
        _poll_until(cache, lambda: restoring.ended)
        told["restored"] = restoring.tokens
        _end(cache, tier.clear())
        cache.clear()
        prefetch = tier.prefetch(TokenKey(PROMPT))
        _poll_until(cache, lambda: prefetch.ended)
        told["after clear"] = prefetch.gained_tokens
        _end(cache, tier.detach())
        told["detached"] = not tier.client.attached
    told["versions"] = [_clear_and_attach(settings, group, folder) for _ in range(2)]
    return told


def _clear_and_attach(settings: dict[str, Any], group: Any, folder: Path) -> bool:
    """Give a version and attach a store that has it on rank 0 alone; whether it is durable."""
    directory = folder / f"versions-{group.rank()}"
    directory.mkdir(exist_ok=True)
    for each in directory.glob("*.version") if group.rank() else ():
        each.unlink()
    with Cache.open(["full"], ranks=group, **settings) as cache:
        tier: Any = cache.storage
        cache.clear(version="rev-1")
        tier.attach(open_storage(f"file:{directory}?capacity=64MiB"))
        durable: bool = cache.drain()
        _serve(cache)
        return durable


def _serve(cache: Cache) -> None:
    for _ in range(2):
        request = cache.begin(TokenKey(PROMPT))
        assert cache.admit(request).admitted
        cache.load_back(request)
        _poll_until(cache, lambda: request.ready)  # noqa: B023 - called at once
        n_tokens = request.prompt - request.computed
        assert cache.allocate(request, n_tokens)
        cache.computed(request, n_tokens)
        cache.finish(request)
        cache.drain()


def _end(cache: Cache, ticket: StorageTicket) -> None:
    _poll_until(cache, lambda: ticket.done)


def _poll_until(cache: Cache, is_over: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if is_over():
            return
        cache.poll()
    raise AssertionError("it does not end")


def _error(call: Callable[[], object]) -> str:
    try:
        call()
    except KvgraftError as error:
        return f"{type(error).__name__}: {error}"
    return ""
