"""The classes of requests' data, as the eviction policy says."""

from __future__ import annotations

from typing import Any

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
        self.policy: Any = policy  # its answers are checked
        self.classifies = policy.classifies
        base = tree.components[0]
        self.allocator = base.device.allocator
        pools = [base.device] if base.host is None else [base.device, base.host]
        n_pages = max(pool.capacity for pool in pools) // base.slots_per_page
        policy.opened(n_pages * tree.page_size)

    def begin(self, request: Request) -> None:
        """Classify a request; the match that follows uses its class.

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
        self._sort(request, "classify", its_class)

    def admitted(self, request: Request) -> None:
        """The request runs: its prompt counts as used, once, even if it is restarted.

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
        """The request ends; its data gets the class that the policy returns now.

        Raises:
            ContractViolation: K1, the policy gives no class; P5, its code raises.
        """
        if not self.classifies:
            return
        try:
            its_class = self.policy.finished(self._use(request), self.tree.clock, hint)
        except Exception as error:
            raise self._failed("finished", error) from error
        self._sort(request, "finished", its_class)

    def _failed(self, call: str, error: Exception) -> ContractViolation:
        said = f"policy {self.policy.name!r}: `{call}` raised {type(error).__name__}: {error}"
        return ContractViolation("P5", None, said)

    def _sort(self, request: Request, call: str, its_class: Any) -> None:
        """Use the class that the policy gave for all that the request uses from now on."""
        if its_class is request.use_class is self.tree.use_class and request.use_retention is None:
            return  # as before, and the tree knows
        if type(its_class) is not int or not 0 <= its_class < MAX_CLASSES:
            said = f"gives class {its_class!r:.40}; give an int from 0 to {MAX_CLASSES - 1}"
            raise ContractViolation("K1", None, f"policy {self.policy.name!r}: `{call}` {said}")
        request.use_class = self.tree.use_class = its_class
        request.use_retention = self.tree.use_retention = None

    def _use(self, request: Request) -> Use:
        """The request's current use: its key may have been cut, or its prompt have grown."""
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
