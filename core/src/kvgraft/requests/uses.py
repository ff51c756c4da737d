"""Tells the eviction policy of requests, so that stamps carry the classes it gives them."""

from __future__ import annotations

from kvgraft.errors import ConfigError
from kvgraft.policies.policy import EvictionPolicy, Hint, Use
from kvgraft.requests.request import Request
from kvgraft.tree.tree import Tree

__all__ = ["Uses"]


class Uses:
    """The policy's view of requests; does nothing for a policy without classes.

    Args:
        tree: stamps the data that requests use.
        policy: orders what leaves its pools.
    """

    def __init__(self, tree: Tree, policy: EvictionPolicy) -> None:
        self.tree = tree
        self.policy = policy
        self.classifies = policy.classifies
        base = tree.components[0]
        pools = [base.device] if base.host is None else [base.device, base.host]
        n_pages = max(pool.capacity for pool in pools) // base.slots_per_page
        policy.opened(n_pages * tree.page_size)

    def begin(self, request: Request) -> None:
        """Classify a request; the match that follows is of the class of reused data."""
        if not self.classifies:
            return
        use = self._use(request)
        reused, request.use_class, memo = self.policy.classify(use)
        request.use = use._replace(memo=memo)
        self.tree.use_class = reused

    def admitted(self, request: Request) -> None:
        """The request runs: its prompt counts as used."""
        if request.use is not None:
            self.policy.admitted(self._use(request, request.use), self.tree.clock)

    def finish(self, request: Request, hint: Hint | str | None) -> None:
        """The request ends; what it leaves is of the class that the policy says now.

        Raises:
            ConfigError: no hint of that name.
        """
        if hint is not None:
            hint = _expect_hint(hint)
        if request.use is not None:
            use = self._use(request, request.use)
            request.use_class = self.tree.use_class = self.policy.finished(use, hint)

    def _use(self, request: Request, before: Use | None = None) -> Use:
        allocated = self.tree.components[0].device.allocator.n_allocated
        key = request.key
        memo = None if before is None else before.memo
        return Use(key.namespace, key.data, request.prompt, allocated, memo)


def _expect_hint(hint: Hint | str) -> Hint:
    try:
        return Hint(hint)
    except ValueError:
        names = ", ".join(f"{each.value!r}" for each in Hint)
        raise ConfigError(f"finish: hint {hint!r:.40}; use one of {names}, or None") from None
