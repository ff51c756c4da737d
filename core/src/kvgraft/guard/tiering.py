"""The storage tier of a guarded cache (S1, S2, S5); `kvgraft.guard.traffic` has the rest.

What the tier does is an operation of its own: it runs before or behind the cache's, not inside, so
that each is held to what it may change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import wraps
from typing import TYPE_CHECKING, Any

from kvgraft.errors import ContractViolation
from kvgraft.guard.traffic import Traffic
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.requests.request import expect_key
from kvgraft.storage_tier.fetching import Fetch
from kvgraft.storage_tier.inventory import backed_on_host
from kvgraft.tree.operations import Operation
from kvgraft.tree.segments import default_segment

if TYPE_CHECKING:
    from kvgraft.cache import Cache
    from kvgraft.storage_tier import StorageTier

__all__ = ["Tiering"]

OPERATIONS = ("prefetch", "cancel", "attach", "detach", "clear", "load")
"""Of the tier, besides `poll`, `drain` and what happens when a request begins."""


class Tiering:
    """Watches a cache's storage tier.

    Args:
        cache: the cache; its methods must be wrapped already.
        operations: transfers in flight between DEVICE and HOST.
        is_looking: whether an operation of the cache is looked at now.
        outside: what is done within it changes the books outside of the cache's operations.
        period: how many calls of the store there are to one whose addresses are compared.
    """

    def __init__(
        self,
        cache: Cache,
        tier: StorageTier,
        operations: Callable[[], Iterable[Operation]],
        is_looking: Callable[[], bool],
        outside: Callable[[], AbstractContextManager[None]],
        period: int,
    ) -> None:
        self.cache = cache
        self.tier = tier
        self.operations = operations
        self.is_looking = is_looking
        self.outside = outside
        Traffic(tier, period)
        poll, drain = tier.poll, tier.drain
        for name in OPERATIONS:
            setattr(tier, name, self._step(getattr(tier, name)))
        setattr(tier, "poll", self._apart(self._step(poll), None))  # noqa: B010
        setattr(tier, "drain", self._apart(self._step(drain), True))  # noqa: B010
        self._before_begin = self._step(tier.before_begin)
        setattr(tier, "before_begin", self._apart(tier.before_begin, None))  # noqa: B010
        setattr(cache, "begin", self._around_begin(cache.begin))  # noqa: B010
        setattr(cache, "poll", self._before(cache.poll))  # noqa: B010
        setattr(cache, "drain", self._behind(cache.drain))  # noqa: B010

    # -- apart from the cache's operations

    def _apart(self, call: Callable[..., Any], otherwise: object) -> Callable[..., Any]:
        """Nothing, inside an operation of the cache that is looked at."""

        @wraps(call)
        def apart(*given: Any, **named: Any) -> Any:
            return otherwise if self.is_looking() else call(*given, **named)

        return apart

    def _around_begin(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        """A request's fetched pages are published before it is matched, and only matched then."""

        @wraps(begin)
        def call(key: Any, **named: Any) -> Any:
            self._before_begin(expect_key(key), named.get("prefetch"))
            return begin(key, **named)

        return call

    def _before(self, poll: Callable[[], int]) -> Callable[[], int]:
        @wraps(poll)
        def call() -> int:
            self.tier.poll()
            return poll()

        return call

    def _behind(self, drain: Callable[[], bool]) -> Callable[[], bool]:
        @wraps(drain)
        def call() -> bool:
            ended = drain()
            return self.tier.drain(self.cache.config.transfer_timeout_s) and ended

        return call

    # -- what is checked

    def _step(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(operation)
        def call(*given: Any, **named: Any) -> Any:
            with self.outside():
                result = operation(*given, **named)
                self._check_in_flight()
                for fetch in self._fetches():
                    self._check_start(fetch)
            return result

        return call

    def _fetches(self) -> list[Fetch]:
        return list(self.tier.prefetching._flying.values())

    def _check_in_flight(self) -> None:
        """Slots that prefetches hold are counted, and below the cap (S2, S5)."""
        prefetching = self.tier.prefetching
        held = dict.fromkeys((component.name for component in self.cache.tree.components), 0)
        nbytes = 0
        for ledger, slots in prefetching.owners():
            n_slots = len(slots) // SLOT_BYTES
            held[ledger.component] += n_slots
            index = self.cache.tree.component(ledger.component).index
            nbytes += n_slots * self.tier.context.slabs.nbytes[index]
        cap = self.tier.settings.prefetch_nbytes
        if prefetching.nbytes_in_flight != nbytes or nbytes > cap:
            raise ContractViolation(
                "S2",
                None,
                f"prefetches hold {nbytes} bytes of HOST, {prefetching.nbytes_in_flight} are "
                f"counted, {cap} allowed",
            )
        for operation in self.operations():
            for node in operation.nodes if operation.to_host else ():
                for component, cell in zip(self.cache.tree.components, node.cells):
                    if cell.incoming is not None and cell.incoming.operation is operation:
                        held[component.name] += len(cell.incoming.slots) // SLOT_BYTES
        for component in self.cache.tree.components:
            assert component.host is not None
            if component.host.in_flight != held[component.name]:
                raise ContractViolation(
                    "S5",
                    component.name,
                    f"{component.host.in_flight} HOST slots are in flight, backups and prefetches "
                    f"own {held[component.name]}",
                )

    def _check_start(self, fetch: Fetch) -> None:
        """It begins below a root or a node backed on HOST, which it pins (S1)."""
        receipt = fetch._receipt
        if receipt is not None and not fetch.ended and receipt.host_from is None:
            raise ContractViolation("S1", None, f"a prefetch from page {fetch.start} pins nothing")
        if receipt is None or receipt.released:
            raise ContractViolation("S1", None, "a prefetch holds no pins of its own")
        node = receipt.anchor
        needed = [
            cell
            for component, cell in zip(self.cache.tree.components, node.cells)
            if any(node.start < high for _, high in default_segment(component, node.end))
        ]
        pinned = node.parent is None or all(cell.host_pins for cell in needed)
        if node.end != fetch.start or not pinned or not backed_on_host(self.cache.tree, node):
            raise ContractViolation(
                "S1", None, f"a prefetch from page {fetch.start} begins at {node!r}, {pinned=}"
            )
