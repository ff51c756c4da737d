"""Tells the eviction policy of requests, so that stamps carry the classes it gives them."""

from __future__ import annotations

from typing import Any

from kvgraft.errors import ConfigError, ContractViolation
from kvgraft.policies.policy import MAX_CLASSES, EvictionPolicy, Hint, Use
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
        """Classify a request; the match that follows is of its class.

        Raises:
            ContractViolation: K1, the policy gives no class; P5, its code raises.
        """
        if not self.classifies:
            return
        use = self._use(request)
        its_class, memo = self._ask("classify", use)
        request.use_class = self.tree.use_class = self._expect_class("classify", its_class)
        request.use = use._replace(memo=memo)

    def admitted(self, request: Request) -> None:
        """The request runs: its prompt counts as used, once, also if it is restarted."""
        if request.use is not None and not request.use_counted:
            self._ask("admitted", self._use(request, request.use), self.tree.clock)
            request.use_counted = True

    def finish(self, request: Request, hint: Hint | str | None) -> None:
        """The request ends; what it leaves is of the class that the policy says now.

        Raises:
            ConfigError: no hint of that name.
            ContractViolation: K1, the policy gives no class.
        """
        if hint is not None:
            hint = _expect_hint(hint)
        if request.use is not None:
            use = self._use(request, request.use)
            its_class = self._ask("finished", use, self.tree.clock, hint)
            request.use_class = self.tree.use_class = self._expect_class("finished", its_class)

    def _ask(self, call: str, *given: object) -> Any:
        """The policy's answer.

        Raises:
            ContractViolation: P5, its code raises.
        """
        try:
            answer = getattr(self.policy, call)(*given)
            if call == "classify":
                its_class, memo = answer
                return its_class, memo
            return answer
        except Exception as error:
            said = f"policy {self.policy.name!r}: `{call}` raised {type(error).__name__}: {error}"
            raise ContractViolation("P5", None, said) from error

    def _expect_class(self, call: str, its_class: object) -> int:
        if type(its_class) is int and 0 <= its_class < MAX_CLASSES:
            return its_class
        raise ContractViolation(
            "K1",
            None,
            f"policy {self.policy.name!r}: `{call}` gives class {its_class!r:.40}; "
            f"give an int from 0 to {MAX_CLASSES - 1}",
        )

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
