"""A circuit breaker: after failures in a row it stops calls to a backend, then tries again.

CLOSED ─ failure_limit calls fail in a row ─► OPEN ─ cooldown passes ─► HALF_OPEN
   ▲                                           ▲ └────── a trial fails ──────┤
   └───────────────────────────── a trial succeeds ──────────────────────────┘

Reads and writes have one each, and in it every verb counts its own failures: a store that lists or
takes data may be unable to return any.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable

__all__ = ["Access", "Breaker", "BreakerState"]


logger = logging.getLogger("kvgraft")


class Access(str, enum.Enum):
    """Kinds of calls to a store; each has a breaker, and takes turns in the queue."""

    READ = "read"
    WRITE = "write"


class BreakerState(str, enum.Enum):
    """States of a breaker: the calls that it lets through."""

    CLOSED = "closed"
    """Everything."""
    OPEN = "open"
    """Nothing."""
    HALF_OPEN = "half-open"
    """One trial."""


class Breaker:
    """Counts failures and decides which calls may run; thread-safe.

    Args:
        failure_limit: failing calls in a row that open it.
        cooldown_s: seconds until the first trial; doubles with each that fails.
        cooldown_limit_s: longest cooldown.
        clock: monotonic, in seconds.
        access: its purpose, for messages.

    Attributes:
        opened: how often it has opened.
    """

    def __init__(
        self,
        failure_limit: int,
        cooldown_s: float,
        cooldown_limit_s: float,
        clock: Callable[[], float],
        access: Access,
    ) -> None:
        self.opened = 0
        self._access = access
        self._limit = failure_limit
        self._shortest = self._cooldown = cooldown_s
        self._longest = cooldown_limit_s
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._state = BreakerState.CLOSED
        self._retry_at = 0.0
        self._lock = threading.Lock()

    @property
    def state(self) -> BreakerState:
        """As of the last call."""
        return self._state

    @property
    def lets_pass(self) -> bool:
        """Whether ordinary calls may go to the backend."""
        return self._state is BreakerState.CLOSED

    def take_trial(self) -> bool:
        """Whether a trial is due; true once per cooldown, and the caller makes it."""
        with self._lock:
            if self._state is not BreakerState.OPEN or self._clock() < self._retry_at:
                return False
            self._state = BreakerState.HALF_OPEN
            return True

    def end_trial(self, *, healthy: bool) -> None:
        """End the trial; the cooldown stays long until an ordinary call succeeds."""
        with self._lock:
            if self._state is not BreakerState.HALF_OPEN:
                return
            if healthy:
                logger.warning(
                    "storage: the store is back and used again for %ss", self._access.value
                )
                self._state = BreakerState.CLOSED
                self._failures = dict.fromkeys(self._failures, self._limit - 1)
            else:
                self._open("it is not healthy")

    def succeed(self, verb: str) -> None:
        """An ordinary call succeeded."""
        with self._lock:
            self._failures.pop(verb, None)
            if self._state is BreakerState.CLOSED and not self._failures:
                self._cooldown = self._shortest

    def fail(self, verb: str) -> None:
        """An ordinary call failed."""
        with self._lock:
            self._failures[verb] = self._failures.get(verb, 0) + 1
            if self._failures[verb] >= self._limit and self._state is BreakerState.CLOSED:
                self._open(f"{verb} failed {self._failures[verb]} times in a row")

    def trip(self) -> None:
        """Open at once: no worker is left for a call."""
        with self._lock:
            if self._state is not BreakerState.OPEN:
                self._open("every worker hangs in a call")

    def _open(self, why: str) -> None:
        if self._state is BreakerState.CLOSED:
            logger.warning(
                "storage: the store is left alone for %ss: %s; it is asked again by itself, "
                "every %.0f s at most",
                self._access.value,
                why,
                self._longest,
            )
        self.opened += 1
        self._state = BreakerState.OPEN
        self._retry_at = self._clock() + self._cooldown
        self._cooldown = min(2 * self._cooldown, self._longest)
