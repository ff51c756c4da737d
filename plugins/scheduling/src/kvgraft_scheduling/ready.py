"""Waiting on asyncio for a load-back or a prefetch, while the loop's other tasks run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvgraft.cache import Cache
from kvgraft.errors import LeaseError, TransferError
from kvgraft.parts import Prefetch
from kvgraft.requests.request import ADMITTED, Request

__all__ = ["ready"]

FIRST_PAUSE_S = 0.0002
"""Pause after a poll that finds nothing; it doubles each time."""

LONGEST_PAUSE_S = 0.01
"""Longest pause between two polls."""


async def ready(cache: Cache, awaited: Request | Prefetch) -> None:
    """Wait until `awaited.ready`, see `Cache.ready`."""
    if cache.storage and not isinstance(awaited, Request):
        cache.storage.expect(awaited)
        waits_for, instead = "prefetch", "begin without it"
    else:
        cache.expect(awaited, ADMITTED)
        if not awaited.load_started and awaited.needs_load_back:  # type: ignore[union-attr]
            raise LeaseError("ready before load_back: no copy is under way; call load_back")
        waits_for, instead = "load-back", "abort the request"

    def ended() -> bool:
        if isinstance(awaited, Request) and awaited.stage is not ADMITTED:
            cache.expect(awaited, ADMITTED)
        return awaited.ready

    timeout_s = cache.config.transfer_timeout_s
    if not await _until(ended, cache.poll, timeout_s):
        raise TransferError(
            f"the {waits_for} has not ended in {timeout_s:g} s; await it again, or {instead}: "
            "see transfer_timeout_s"
        )


async def _until(ended: Callable[[], bool], poll: Callable[[], object], timeout_s: float) -> bool:
    """Poll until `ended` says so, at most `timeout_s` seconds of the loop's clock; whether it did.

    The running loop sleeps between two looks, so that nothing of it is left when it is cancelled.
    It asks `ended` before each poll: another task may have polled meanwhile.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    pause = FIRST_PAUSE_S
    while not ended():
        poll()
        if ended():
            break
        left = deadline - clock()
        if left <= 0:
            return False
        await asyncio.sleep(min(pause, left))
        pause = min(2 * pause, LONGEST_PAUSE_S)
    return True
