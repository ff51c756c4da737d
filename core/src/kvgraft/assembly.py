"""Putting a cache together: components mounted, pools built, books opened, parts made.

A cache asks for its parts once, when it is built, and replaces nothing afterwards. The guard is a
factory whose parts are those below with checks around them (`kvgraft_guard`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from kvgraft.config import CacheConfig, GuardMode, WritePolicy
from kvgraft.devices import SIMULATED, DeviceRuntime, torch_device
from kvgraft.errors import ConfigError
from kvgraft.optional import load_part
from kvgraft.packages.dispatch import Mounted, mount
from kvgraft.packages.registry import Plugin, load_policy, select
from kvgraft.parts import NoStorage
from kvgraft.pools import BuildContext, DevicePool, HostMirror
from kvgraft.pools.plan import AvailableMemory, PoolPlan, available_nbytes
from kvgraft.requests.eviction import Evictor
from kvgraft.requests.request import Request
from kvgraft.transfers import (
    CpuTransferEngine,
    Journal,
    NoPayloadTransferEngine,
    TransferEngine,
)
from kvgraft.tree.component import ordered
from kvgraft.tree.eviction import use_policy
from kvgraft.tree.ledger import Ledger, PoolBooks
from kvgraft.tree.tree import Tree
from kvgraft.types import Kind, Tier

if TYPE_CHECKING:
    from pluggy import PluginManager

    from kvgraft.parts import Arenas, Recorder, StorageTier

Made = TypeVar("Made")
Given = ParamSpec("Given")


class PartsFactory:
    """The parts of a cache as they are.

    A subclass makes parts of its own; they keep the promises of those they replace. For most parts
    it only chooses the class (`kind`), and may wrap the making (`make`).

    Args:
        config: the cache's settings.

    Attributes:
        clock: monotonic, in seconds; the storage tier's waits are counted in them.
        policy: the eviction policy of the cache.
        tenants: who shares its pools; None where all requests are alike.
    """

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.clock: Callable[[], float] = time.monotonic
        self.policy = load_policy(config.policy)
        self.tenants: Any = load_part("tenants")(config.tenants) if config.tenants else None

    @cached_property
    def runtime(self) -> DeviceRuntime | None:
        """The device of the pools and of copies; None for torch's memory and worker threads.

        Set another one before the cache is built, such as a simulated one with its own schedule.
        """
        name = self.config.device
        if name == SIMULATED:
            simulated: DeviceRuntime = load_part("simulated")()
            return simulated
        if self.config.payload and torch_device(name).type not in ("cpu", "meta"):
            accelerator: DeviceRuntime = load_part("accelerator")(name)
            return accelerator
        return None

    def kind(self, plain: type[Made]) -> type[Made]:
        """The class of a part: `plain`, or a subclass of it."""
        return plain

    def make(self, plain: Callable[Given, Made], *given: Given.args, **named: Given.kwargs) -> Made:
        """A part of class `plain`, or of a subclass of it."""
        kind: Any = plain
        made: Made = self.kind(kind)(*given, **named)
        return made

    def hook_manager(self, plugin: Plugin) -> PluginManager | None:
        """Calls a component's hooks with wrappers around them; None where they are called alone."""
        del plugin
        return None

    def ledger(self, each: Mounted, tier: Tier, pool: DevicePool | HostMirror) -> PoolBooks:
        """The books of one of a component's pools in the tree."""
        name, allocator = each.name, pool.allocator
        if self.tenants is None:
            kind: type[Ledger] = Ledger
            if pool.planned is not None and pool.planned.limit_slots is not None:
                kind = load_part("memory").ledger
            return kind(name, tier, allocator)
        granule = 1 if each.shape.kind is Kind.STATE else each.shape.slots_per_page
        shared: PoolBooks = self.tenants.ledger(name, tier, allocator, granule)
        return shared

    def tree(self, mounted: Sequence[Mounted]) -> Tree:
        """The prefix tree over the components' pools, with the books of each."""
        device, host = {}, {}
        for each in mounted:
            device[each.name] = self.ledger(each, Tier.DEVICE, each.component.device)
            if each.component.host is not None:
                host[each.name] = self.ledger(each, Tier.HOST, each.component.host)
        tree = self.make(
            Tree,
            self.config.page_size,
            [each.shape for each in mounted],
            device,
            host,
            prefix_closed_host=self.config.write_policy is not WritePolicy.WRITE_BACK,
        )
        if self.tenants is not None:
            tree.tenant_of = self.tenants.of
        use_policy(tree, self.policy)
        return tree

    def engine(self) -> TransferEngine:
        """Streams of the device, worker threads for CPU pools, nothing without payload."""
        if not self.config.payload:
            return NoPayloadTransferEngine()
        if self.runtime is not None:
            on_streams: Callable[..., TransferEngine] = load_part("streams")
            return on_streams(self.runtime, fence_timeout_s=self.config.transfer_timeout_s)
        return CpuTransferEngine(fence_timeout_s=self.config.transfer_timeout_s)

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
        tier: Callable[..., StorageTier] = self.kind(load_part("storage"))
        return tier(tree, mounted, evictor, self.config.storage, self.clock, requests=requests)

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
        """Makes events of the tree's changes, once a reader opens a stream."""
        recorder: Callable[..., Recorder] = load_part("events")
        return recorder(tree, ended)

    def ready(self, cache: Any) -> Any:
        """The cache has all its parts; the result becomes `Cache.guard`, None without a guard."""
        del cache
        return None


def parts_of(config: CacheConfig) -> PartsFactory:
    """The parts for some settings: the plain ones, or the guard's.

    Only this function names the guard, which is loaded if it is switched on.
    """
    if config.guard is GuardMode.OFF:
        return PartsFactory(config)
    guarded: type[PartsFactory] = load_part("guard")
    return guarded(config)


def mount_all(
    config: CacheConfig,
    plugins: Sequence[Plugin] = (),
    available: AvailableMemory = available_nbytes,
    parts: PartsFactory | None = None,
) -> list[Mounted]:
    """The configured components, built, in the tree's order.

    Their pools are built first and take memory once all are known to fit.

    Args:
        config: names the components, as `package` or `package@label`.
        plugins: packages used instead of installed ones of the same name.
        available: says how much memory there is.
        parts: gives the wrappers around the components' hooks; by default there are none.

    Raises:
        ConfigError: a component that is not installed, an empty label, or pools larger than the
            memory there is.
        PluginError: one that cannot be used.
    """
    check_device(config)
    parts = parts or PartsFactory(config)
    plan = PoolPlan(available, config.payload, parts.runtime, shared_budgets(config))
    mounted = build_components(config, chosen_packages(config, plugins), plan, parts)
    plan.settle()
    return [mounted[shape.name] for shape in ordered([each.shape for each in mounted.values()])]


def size_pools(config: CacheConfig, plugins: Sequence[Plugin] = ()) -> CacheConfig:
    """The settings with `device_tokens` and `host_tokens` for pools that are sized in bytes."""
    if config.device_bytes is None and config.host_bytes is None:
        return config
    sized: CacheConfig = load_part("sizes")(config, plugins)
    return sized


def chosen_packages(config: CacheConfig, plugins: Sequence[Plugin]) -> dict[str, Plugin]:
    """The package of every component, under the component's name."""
    packages = {name: _package(name) for name in config.components}
    available = {plugin.name: plugin for plugin in plugins}
    wanted = dict.fromkeys(packages.values())
    available |= {each.name: each for each in select([n for n in wanted if n not in available])}
    return {name: replace(available[package], name=name) for name, package in packages.items()}


def build_components(
    config: CacheConfig, chosen: Mapping[str, Plugin], plan: PoolPlan, parts: PartsFactory
) -> dict[str, Mounted]:
    """Every component over pools that are part of the plan."""
    context = BuildContext(
        page_size=config.page_size,
        device=str(torch_device(config.device)),
        device_tokens=config.device_tokens,
        host_tokens=config.host_tokens,
        pin_host=torch_device(config.device).type == "cuda",
    )
    mounted = {}
    for name, plugin in chosen.items():
        with plan.building(name):
            mounted[name] = mount(
                plugin, config.components[name], context, parts.hook_manager(plugin)
            )
    return mounted


def shared_budgets(config: CacheConfig) -> dict[Tier, int]:
    """Bytes of the tiers whose pools share one budget; a store reads HOST where it is."""
    budgets = {Tier.DEVICE: config.device_memory or 0}
    if config.storage is None:
        budgets[Tier.HOST] = config.host_memory or 0
    if any(budgets.values()):
        load_part("memory")  # where it is missing this says so, before a component asks for it
    return {tier: nbytes for tier, nbytes in budgets.items() if nbytes}


def _package(name: str) -> str:
    """The package of a component; the text after an @ tells its instances apart."""
    package, at, label = name.partition("@")
    if at and not (package and label):
        raise ConfigError(f"component {name!r}: write package@label, both parts named")
    return package


def check_device(config: CacheConfig) -> None:
    """Refuse a device unknown to torch or missing here, or storage without payload."""
    expect_device(config.device)
    if not config.payload and config.storage is not None:
        raise ConfigError("setting payload=False: storage keeps payloads; leave one of them out")


def expect_device(name: str) -> None:
    """Refuse a device unknown to torch or missing here.

    Raises:
        ConfigError: so.
    """
    try:
        device = torch_device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if reason.startswith("Expected one of"):  # and lists twenty
            reason = "torch knows no such device"
        raise ConfigError(f"device {name!r}: {reason}; use {_devices_here()}") from error
    is_ours = device.type in ("cpu", "meta") or name == SIMULATED
    if not is_ours and not _is_here(device):
        kind = device.type.upper()
        raise ConfigError(f"device {name!r}: no {kind} device here; use {_devices_here()}")


def _devices_here() -> str:
    """Names of devices, for a message."""
    found = [each for each in ("cuda", "xpu") if _is_here(torch_device(each))]
    names = ["cpu", *found, SIMULATED]
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _is_here(device: torch.device) -> bool:
    """Whether torch can use a device; of some it knows the name alone."""
    try:
        return bool(torch.get_device_module(device).is_available())
    except (RuntimeError, AttributeError):
        return False
