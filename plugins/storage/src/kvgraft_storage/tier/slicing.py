"""Limits the time that the storage tier takes at once on the scheduler's thread.

Work per page is done in steps of at most a fraction of a millisecond. A call runs steps until its
slice of time is spent, one step of each task in turn; the rest is left to the next call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

__all__ = ["Pace", "Slice"]

SLICE_S = 0.0006
"""Seconds after which a call begins no further step."""


class Slice:
    """The time of one call.

    Args:
        timer: monotonic, in seconds.
        seconds: how many there are.
    """

    __slots__ = ("_end", "_timer")

    def __init__(self, timer: Callable[[], float], seconds: float) -> None:
        self._timer = timer
        self._end = timer() + seconds

    @property
    def spent(self) -> bool:
        """Whether it is over."""
        return self._timer() >= self._end


class Pace(NamedTuple):
    """Makes slices.

    Attributes:
        timer: monotonic, in seconds.
        seconds: of each slice.
    """

    timer: Callable[[], float] = time.perf_counter
    seconds: float = SLICE_S

    def slice(self) -> Slice:
        """A slice that begins now."""
        return Slice(self.timer, self.seconds)
