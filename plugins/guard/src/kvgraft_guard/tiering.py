"""The storage tier of a guarded cache (S1, S2, S5); `kvgraft_guard.traffic` has the rest.

A step of the tier is an operation of its own, even inside one of the cache's: each may make only
its own changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraft.cache import Cache
from kvgraft.errors import ContractViolation
from kvgraft.pools.allocator import SLOT_BYTES
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.node import Node
from kvgraft_guard.traffic import GuardedClient, GuardedPrefetching, GuardedStoring, Traffic
from kvgraft_guard.watching import Guard
from kvgraft_storage import StorageBackend, StorageTicket
from kvgraft_storage.tier import Prefetch, Restoring, StorageTier
from kvgraft_storage.tier.fetching import Fetch
from kvgraft_storage.tier.inventory import backed_on_host

if TYPE_CHECKING:
    _Tier = StorageTier
else:
    _Tier = object

__all__ = ["GuardedTier", "SteppedTier", "Tiering", "guarded_tier"]


class SteppedTier(_Tier):
    """A storage tier, ours or another package's, whose steps are checked one by one."""

    watched: Guard | Tiering | None = None

    def watch(self, cache: Cache, guard: Guard) -> None:
        """Check its steps from now on."""
        del cache
        self.watched = guard

    def _step(self) -> AbstractContextManager[None]:
        return nullcontext() if self.watched is None else self.watched.step()

    def attach(self, backend: StorageBackend) -> None:
        with self._step():
            super().attach(backend)

    def detach(self, deadline_s: float | None = None) -> StorageTicket:
        with self._step():
            return super().detach(deadline_s)

    def clear(self) -> StorageTicket:
        with self._step():
            return super().clear()

    def cleared(self, namespaces: Collection[object] | None, version: object = None) -> bool:
        with self._step():
            return super().cleared(namespaces, version)

    def prefetch(self, key: TokenKey) -> Prefetch:
        with self._step():
            return super().prefetch(key)

    def cancel(self, prefetch: Prefetch) -> None:
        with self._step():
            super().cancel(prefetch)

    def load(self, path: str | Path) -> Restoring:
        with self._step():
            return super().load(path)

    def before_begin(self, key: TokenKey, prefetch: Prefetch | None) -> None:
        with self._step():
            super().before_begin(key, prefetch)

    def poll(self) -> None:
        with self._step():
            super().poll()

    def drain(self, timeout_s: float) -> bool:
        with self._step():
            return super().drain(timeout_s)


class GuardedTier(SteppedTier, StorageTier):
    """Our storage tier, whose prefetches and calls to the store are checked, too."""

    new_client = GuardedClient
    new_storing = GuardedStoring
    new_prefetching = GuardedPrefetching

    def watch(self, cache: Cache, guard: Guard) -> None:
        self.watched = tiering = Tiering(cache, self, guard)
        for part in (self.client, self.storing, self.prefetching):
            assert isinstance(part, (GuardedClient, GuardedStoring, GuardedPrefetching))
            part.traffic = tiering.traffic


def guarded_tier(plain: Any) -> type[SteppedTier]:
    """The class of a storage tier with its steps checked; for ours with all checks."""
    if plain is StorageTier:
        return GuardedTier
    return type("StorageTier", (SteppedTier, plain), {})


class Tiering:
    """Checks the books after each step of one storage tier.

    Args:
        cache: the cache.
        tier: its storage tier.
        guard: knows the transfers between DEVICE and HOST, and keeps operations apart.

    Attributes:
        traffic: checks of the calls to the store.
    """

    def __init__(self, cache: Cache, tier: StorageTier, guard: Guard) -> None:
        self.cache = cache
        self.tier = tier
        self.guard = guard
        self.traffic = Traffic(tier, guard.period)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step of the tier; the slots that it holds afterwards are counted and pinned."""
        with self.guard.step():
            yield
            self._check_in_flight()
            for fetch in self._fetches():
                self._check_start(fetch)

    def _fetches(self) -> list[Fetch]:
        return list(self.tier.prefetching.in_flight.values())

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
        for operation in self.guard.watched.operations():
            for node in operation.nodes if operation.to_host else ():
                for component, cell in zip(self.cache.tree.components, node.cells):
                    if cell.incoming is not None and cell.incoming.operation == id(operation):
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
        receipt = fetch.receipt
        if receipt is not None and not fetch.ended and receipt.host_from is None:
            raise ContractViolation("S1", None, f"a prefetch from page {fetch.start} pins nothing")
        if receipt is None or receipt.released:
            raise ContractViolation("S1", None, "a prefetch holds no pins of its own")
        node = receipt.anchor
        needed = [
            cell
            for component, cell in zip(self.cache.tree.components, node.cells)
            if any(node.start < high for _, high in component.segment_at(node.end))
        ]
        pinned = node.parent is None or all(cell.host_pins for cell in needed)
        for component in self.cache.tree.prefix_closed:
            above: Node | None = node
            while pinned and above is not None and above.parent is not None:
                pinned = above.cells[component.index].host_pins > 0
                above = above.parent
        if node.end != fetch.start or not pinned or not backed_on_host(self.cache.tree, node):
            raise ContractViolation(
                "S1", None, f"a prefetch from page {fetch.start} begins at {node!r}, {pinned=}"
            )
