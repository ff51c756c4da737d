"""Classes, priorities and times to live of a request's data, as policy and engine have it."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Any, Final, NamedTuple

from kvgraft.errors import ConfigError, ContractViolation
from kvgraft.policies.policy import MAX_CLASSES, EvictionPolicy, Hint, Use
from kvgraft.requests.request import Request
from kvgraft.tree.tree import Tree


class AccessTracker:
    """The policy's view of requests; does nothing for a policy without classes.

    Args:
        tree: stamps the data that requests use.
        policy: orders what leaves its pools.
    """

    def __init__(self, tree: Tree, policy: EvictionPolicy) -> None:
        self.tree = tree
        self.policy: Any = policy  # its answers are looked at
        self.classifies = policy.classifies
        base = tree.components[0]
        self.allocator = base.device.allocator
        pools = [base.device] if base.host is None else [base.device, base.host]
        n_pages = max(pool.capacity for pool in pools) // base.slots_per_page
        policy.opened(n_pages * tree.page_size)

    def begin(self, request: Request) -> None:
        """Classify a request; the match that follows is of its class.

        Raises:
            ContractViolation: K1, the policy gives no class; P5, its code raises.
        """
        if not self.classifies:
            return
        key = request.key
        use = request.use = Use(
            key.namespace, key.data, request.prompt, self.allocator.n_allocated, key.sums
        )
        try:
            its_class, use.memo = self.policy.classify(use)
        except Exception as error:
            raise self._failed("classify", error) from error
        if type(its_class) is not int or not 0 <= its_class < MAX_CLASSES:
            raise self._no_class("classify", its_class)
        request.use_class = self.tree.use_class = its_class
        request.use_retention = self.tree.use_retention = None

    def admitted(self, request: Request) -> None:
        """The request runs: its prompt counts as used, once, also if it is restarted.

        Raises:
            ContractViolation: P5, the policy's code raises.
        """
        if not self.classifies or request.use_counted:
            return
        try:
            self.policy.admitted(self._use(request), self.tree.clock)
        except Exception as error:
            raise self._failed("admitted", error) from error
        request.use_counted = True

    def finish(self, request: Request, hint: Hint | None) -> None:
        """The request ends; what it leaves is of the class that the policy says now.

        Raises:
            ContractViolation: K1, the policy gives no class; P5, its code raises.
        """
        if not self.classifies:
            return
        try:
            its_class = self.policy.finished(self._use(request), self.tree.clock, hint)
        except Exception as error:
            raise self._failed("finished", error) from error
        if type(its_class) is not int or not 0 <= its_class < MAX_CLASSES:
            raise self._no_class("finished", its_class)
        request.use_class = self.tree.use_class = its_class
        request.use_retention = self.tree.use_retention = None

    def _failed(self, call: str, error: Exception) -> ContractViolation:
        said = f"policy {self.policy.name!r}: `{call}` raised {type(error).__name__}: {error}"
        return ContractViolation("P5", None, said)

    def _no_class(self, call: str, its_class: object) -> ContractViolation:
        return ContractViolation(
            "K1",
            None,
            f"policy {self.policy.name!r}: `{call}` gives class {its_class!r:.40}; "
            f"give an int from 0 to {MAX_CLASSES - 1}",
        )

    def _use(self, request: Request) -> Use:
        """The request's use as it is by now: its key may have been cut, its prompt have grown."""
        use, key = request.use, request.key
        assert use is not None
        use.tokens = key.data
        use.prompt_tokens = request.prompt
        use.allocated = self.allocator.n_allocated
        return use


def expect_hint(call: str, hint: object) -> Hint:
    """The hint of that name.

    Raises:
        ConfigError: there is none.
    """
    try:
        return Hint(hint)
    except ValueError:
        names = ", ".join(f"{each.value!r}" for each in Hint)
        raise ConfigError(f"{call}: hint {hint!r:.40}; use one of {names}, or None") from None


MOST_PRIORITY: Final = 8
"""Priorities are from -8 to 8; each in use costs an order of candidates per pool."""


class RequestedRetention(NamedTuple):
    """The retention that an engine asks for a request's data.

    Attributes:
        priority: data of a lower one leaves first.
        ttl_s: seconds after its use until its time is over.
    """

    priority: int = 0
    ttl_s: float | None = None


class Retentions:
    """Sets how long requests' data is kept; does nothing until a request asks for it.

    Args:
        tree: stamps the data that requests use.
        clock: monotonic, in seconds; of several ranks the same.
    """

    def __init__(self, tree: Tree, clock: Callable[[], float]) -> None:
        self.tree = tree
        self.clock = clock

    def ask(self, call: str, request: Request, priority: Any, ttl_s: Any) -> None:
        """Note what is asked for; what is None stays as it was.

        Raises:
            ConfigError: a priority or a time that cannot be; nothing was noted.
        """
        wanted = request.requested_retention or RequestedRetention()
        if priority is not None:
            if type(priority) is not int or abs(priority) > MOST_PRIORITY:
                raise ConfigError(
                    f"{call}: priority {priority!r:.40}; give a whole number from "
                    f"-{MOST_PRIORITY} to {MOST_PRIORITY}"
                )
            wanted = wanted._replace(priority=priority)
        if ttl_s is not None:
            if type(ttl_s) not in (int, float) or not isfinite(ttl_s) or ttl_s < 0:
                raise ConfigError(f"{call}: ttl_s {ttl_s!r:.70}; give seconds, 0 or more")
            wanted = wanted._replace(ttl_s=float(ttl_s))
        request.requested_retention = wanted

    def used(self, request: Request) -> None:
        """Give the retention that is asked for to all that the request uses from now on."""
        from kvgraft.tree.lifetimes import Lifetimes, Retention

        lifetimes = self.tree.lifetimes
        if lifetimes is None:
            lifetimes = self.tree.lifetimes = Lifetimes(self.tree, self.clock)
        lifetimes.read_clock()
        if request.requested_retention is not None:
            priority, ttl_s = request.requested_retention
            until_s = None if ttl_s is None else lifetimes.now_s + ttl_s
            request.use_retention = Retention(priority, until_s)
        self.tree.use_class, self.tree.use_retention = request.use_class, request.use_retention
