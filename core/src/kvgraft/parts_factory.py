"""Makes the parts of a cache, so that others can be handed in.

A cache asks for its parts once, when it is built, and replaces nothing afterwards. The guard is
such a factory: its parts are those below with checks around them (`kvgraft_guard`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvgraft.admission.promises import Budget
from kvgraft.config import OTHERS, CacheConfig, TenantSettings, WritePolicy
from kvgraft.devices.runtime import SIMULATED, DeviceRuntime, torch_device
from kvgraft.no_storage import NoStorage
from kvgraft.optional import load_part
from kvgraft.packages.dispatch import Mounted
from kvgraft.packages.policies import load_policy
from kvgraft.packages.registry import Plugin
from kvgraft.pools.allocator import SlotAllocator
from kvgraft.pools.resizing import ResizableAllocator
from kvgraft.requests.backup import Backups
from kvgraft.requests.clean_reserve import CleanReserve
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.hits import HitCounts, TenantHitCounts
from kvgraft.requests.pins import Pins
from kvgraft.requests.publishing import Publisher
from kvgraft.requests.request import Request
from kvgraft.requests.resume_points import ResumePoints
from kvgraft.requests.rows import Rows
from kvgraft.requests.state_slots import StateSlots
from kvgraft.requests.stepping import Stepper
from kvgraft.transfers import (
    CpuTransferEngine,
    Journal,
    NoPayloadTransferEngine,
    TransferEngine,
)
from kvgraft.tree.component import ComponentShape
from kvgraft.tree.eviction import use_policy
from kvgraft.tree.explaining import Explanation
from kvgraft.tree.keys import TokenKey
from kvgraft.tree.ledger import Ledger, MovableLedger, PoolBooks
from kvgraft.tree.tenants import Tenant, Tenants
from kvgraft.tree.tree import Tree
from kvgraft.types import Kind, Tier

if TYPE_CHECKING:
    from kvgraft.parts import Arenas, Recorder, StorageTier

__all__ = ["CacheParts", "Part", "PartsFactory", "Watcher"]

Part = TypeVar("Part")


def tenants_of(settings: Mapping[str, TenantSettings]) -> Tenants:
    """The tenants of some settings, and the one that all other namespaces belong to."""
    settings = {**settings, OTHERS: settings.get(OTHERS, TenantSettings())}
    tenants = [
        Tenant(
            name,
            {Tier.DEVICE: each.guarantee, Tier.HOST: each.on_host[0]},
            {Tier.DEVICE: each.limit, Tier.HOST: each.on_host[1]},
            each.weight,
        )
        for name, each in settings.items()
    ]
    named = list(enumerate(settings.values()))
    return Tenants(
        tenants,
        {namespace: index for index, each in named for namespace in each.namespaces},
        {prefix: index for index, each in named for prefix in each.prefixes},
        list(settings).index(OTHERS),
    )


class CacheParts(Protocol):
    """The parts of a cache as a watcher reads them; the cache itself has them all.

    It lets the guard name the cache it watches without importing it.
    """

    config: CacheConfig
    mounted: list[Mounted]
    tree: Tree
    private: list[tuple[Ledger, ...]]
    journal: Journal
    backups: Backups
    clean_reserve: CleanReserve
    points: ResumePoints
    budget: Budget
    publisher: Publisher
    requests: dict[int, Request]
    pins: Pins
    arenas: Arenas | None
    storage: StorageTier | NoStorage

    def explain(self, key: TokenKey) -> Explanation:
        """Why the anchor of `key` is not deeper (M9)."""

    def check_integrity(self) -> None:
        """Recompute every book; raise `IntegrityError` if one is wrong."""


class Watcher(Protocol):
    """An observer of a cache that serves.

    Attributes:
        looked_at: operations that were looked at.
        full_checks: how often all books were recomputed.
    """

    looked_at: int
    full_checks: int


class PartsFactory:
    """The parts of a cache as they are.

    A subclass makes parts of its own; they keep the promises of those they stand for. For most it
    only says of which class they are (`kind`).

    Args:
        config: the cache's settings.

    Attributes:
        clock: seconds that only grow; the storage tier's waits are counted in them.
        policy: the eviction policy of the cache.
        tenants: who shares its pools; None where all requests are alike.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.clock: Callable[[], float] = time.monotonic
        self.policy = load_policy(config.policy)
        self.tenants = tenants_of(config.tenants) if config.tenants else None

    @cached_property
    def runtime(self) -> DeviceRuntime | None:
        """The device of the pools and of copies; None for torch's memory and worker threads.

        Another may be set before the cache is built, a simulated one with a schedule of its own.
        """
        name = self.config.device
        if name == SIMULATED:
            simulated: DeviceRuntime = load_part("simulated")()
            return simulated
        if self.config.payload and torch_device(name).type not in ("cpu", "meta"):
            accelerator: DeviceRuntime = load_part("accelerator")(name)
            return accelerator
        return None

    def kind(self, plain: type[Part]) -> type[Part]:
        """The class of a part: `plain`, or a subclass of it.

        Asked for tree, journal, evictor, clean reserve, backups, resume points, leases,
        load-backs, budget, page slots, state slots, pending pages, offers, publisher and stepper of
        a cache.
        """
        return plain

    def hook_wrappers(self, plugin: Plugin) -> list[object]:
        """Plugins with hook wrappers to run around a component's hooks."""
        del plugin
        return []

    def ledger(self, shape: ComponentShape, tier: Tier, allocator: SlotAllocator) -> PoolBooks:
        """The books of one of a component's pools in the tree."""
        if self.tenants is None:
            kind = MovableLedger if isinstance(allocator, ResizableAllocator) else Ledger
            return kind(shape.name, tier, allocator)
        granule = 1 if shape.kind is Kind.STATE else shape.slots_per_page
        return self.tenants.ledger(shape.name, tier, allocator, granule)

    def hits(self, tree: Tree) -> HitCounts:
        """The counts of hits."""
        return HitCounts(tree) if self.tenants is None else TenantHitCounts(tree, self.tenants)

    def tree(
        self,
        shapes: Sequence[ComponentShape],
        device: dict[str, PoolBooks],
        host: dict[str, PoolBooks],
    ) -> Tree:
        """The prefix tree over the components' ledgers."""
        tree = self.kind(Tree)(
            self.config.page_size,
            shapes,
            device,
            host,
            prefix_closed_host=self.prefix_closed_host,
        )
        if self.tenants is not None:
            tree.tenant_of = self.tenants.of
        use_policy(tree, self.policy)
        return tree

    @property
    def prefix_closed_host(self) -> bool:
        """Whether data on HOST has no gap above it: unless it came there by write-back."""
        return self.config.write_policy is not WritePolicy.WRITE_BACK

    def engine(self) -> TransferEngine:
        """Streams of the device, worker threads for CPU pools, nothing without payload."""
        if not self.config.payload:
            return NoPayloadTransferEngine()
        if self.runtime is not None:
            on_streams: Callable[..., TransferEngine] = load_part("streams")
            return on_streams(self.runtime, fence_timeout_s=self.config.transfer_timeout_s)
        return CpuTransferEngine(fence_timeout_s=self.config.transfer_timeout_s)

    def journal(self, tree: Tree, mounted: Sequence[Mounted], engine: TransferEngine) -> Journal:
        """The transfers in flight."""
        return self.kind(Journal)(tree, mounted, engine)

    def evictor(self, tree: Tree, journal: Journal) -> Evictor:
        """The evictor: it makes room."""
        policy, timeout_s = self.config.write_policy, self.config.transfer_timeout_s
        return self.kind(Evictor)(tree, journal, policy, timeout_s)

    def clean_reserve(self, tree: Tree, journal: Journal, evictor: Evictor) -> CleanReserve:
        """The clean reserve: it copies the next victims ahead."""
        return self.kind(CleanReserve)(tree, journal, evictor, self.config.write_policy)

    def stepper(
        self, tree: Tree, rows: Rows, publisher: Publisher, states: StateSlots, evictor: Evictor
    ) -> Stepper:
        """The steps of all running requests."""
        return self.kind(Stepper)(tree, rows, publisher, states, evictor)

    def storage(
        self,
        tree: Tree,
        mounted: Sequence[Mounted],
        evictor: Evictor,
        requests: Mapping[int, Request],
    ) -> StorageTier | NoStorage:
        """The tier behind HOST, with its store opened, where the configuration has a storage.

        Raises:
            ConfigError: a store that cannot be opened, or components that cannot be stored.
        """
        if self.config.storage is None:
            return NoStorage()
        storage_tier: Callable[..., StorageTier] = load_part("storage")
        return storage_tier(
            tree, mounted, evictor, self.config.storage, self.clock, requests=requests
        )

    def arenas(
        self,
        tree: Tree,
        mounted: Sequence[Mounted],
        evictor: Evictor,
        journal: Journal,
        requests: Mapping[int, Request],
    ) -> Arenas | None:
        """The boundaries between pools that share one budget, where the settings have one.

        Raises:
            ConfigError: a budget that is too small.
        """
        config = self.config
        if config.device_memory is None and config.host_memory is None:
            return None
        arenas: Callable[..., Arenas] = load_part("memory")
        return arenas(config, tree, mounted, evictor, journal, requests)

    def recorder(self, tree: Tree, ended: Callable[[], object]) -> Recorder:
        """Makes events of the tree's changes, once somebody asks for some."""
        recorder: Callable[..., Recorder] = load_part("events")
        return recorder(tree, ended)

    def operations(self, plain: type[Any]) -> type[Any]:
        """The class of the cache itself: `plain`, or a subclass of it."""
        return plain

    def ready(self, cache: CacheParts) -> Watcher | None:
        """The cache has all its parts; the result becomes `Cache.guard`."""
        del cache
        return None
