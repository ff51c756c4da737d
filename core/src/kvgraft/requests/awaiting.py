"""Waiting for copies on an asyncio event loop, while its other tasks run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["FIRST_PAUSE_S", "LONGEST_PAUSE_S", "until"]

FIRST_PAUSE_S = 0.0002
"""After a look that finds nothing, wait this long before the next, and twice as long each time."""

LONGEST_PAUSE_S = 0.01
"""Longest time between two looks."""


async def until(ended: Callable[[], bool], poll: Callable[[], object], timeout_s: float) -> bool:
    """Poll until `ended` says so, at most `timeout_s` seconds of the loop's clock; whether it did.

    The running loop sleeps between two looks, so that nothing of it is left when it is cancelled.
    What others polled meanwhile is seen before polling again.
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
