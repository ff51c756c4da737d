"""The priority and the time to live of requests' data, as engines give them."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Final, NamedTuple

from kvgraft.errors import ConfigError
from kvgraft.requests.request import Request
from kvgraft.sizes import expect_count
from kvgraft.tree.lifetimes import Term, use_lifetimes
from kvgraft.tree.tree import Tree

__all__ = ["MOST_PRIORITY", "Terms", "Wanted"]

MOST_PRIORITY: Final = 8
"""Priorities are from -8 to 8; each in use costs an order of candidates per pool."""


class Wanted(NamedTuple):
    """The treatment that an engine asks for a request's data.

    Attributes:
        priority: data of a lower one leaves first.
        ttl_requests: requests that begin after its use until its time is over.
        ttl_s: seconds after its use until its time is over.
    """

    priority: int = 0
    ttl_requests: int | None = None
    ttl_s: float | None = None


class Terms:
    """Gives requests' uses their terms; does nothing while no request has asked for one.

    Args:
        tree: stamps the data that requests use.
        clock: seconds that only grow; of several ranks the same.
    """

    def __init__(self, tree: Tree, clock: Callable[[], float]) -> None:
        self.tree = tree
        self._clock = clock

    def ask(
        self,
        call: str,
        request: Request,
        priority: Any,
        ttl_requests: Any,
        ttl_s: Any,
    ) -> None:
        """Note what is asked for; what is None stays as it was.

        Raises:
            ConfigError: a priority or a time that cannot be; nothing was noted.
        """
        wanted = request.wanted or Wanted()
        if priority is not None:
            if type(priority) is not int or abs(priority) > MOST_PRIORITY:
                raise ConfigError(
                    f"{call}: priority {priority!r:.40}; give a whole number from "
                    f"-{MOST_PRIORITY} to {MOST_PRIORITY}"
                )
            wanted = wanted._replace(priority=priority)
        if ttl_requests is not None:
            n_requests = expect_count(f"{call}: ttl_requests", ttl_requests)
            wanted = wanted._replace(ttl_requests=n_requests)
        if ttl_s is not None:
            if type(ttl_s) not in (int, float) or not isfinite(ttl_s) or ttl_s < 0:
                raise ConfigError(f"{call}: ttl_s {ttl_s!r:.40}; give seconds, 0 or more")
            wanted = wanted._replace(ttl_s=float(ttl_s))
        request.wanted = wanted
        if self.tree.lifetimes is None:
            use_lifetimes(self.tree, self._clock)

    def begins(self, request: Request) -> None:
        """A request begins: another one for the times in requests, and a use of its data."""
        lifetimes = self.tree.lifetimes
        assert lifetimes is not None
        lifetimes.n_requests += 1
        self.used(request)

    def used(self, request: Request) -> None:
        """Give the term that is asked for to all that the request uses from now on."""
        lifetimes = self.tree.lifetimes
        assert lifetimes is not None
        lifetimes.read_clock()
        if request.wanted is not None:
            priority, ttl_requests, ttl_s = request.wanted
            request.use_term = Term(
                priority,
                None if ttl_requests is None else lifetimes.n_requests + ttl_requests,
                None if ttl_s is None else lifetimes.now_s + ttl_s,
            )
        self.tree.use_class, self.tree.use_term = request.use_class, request.use_term
