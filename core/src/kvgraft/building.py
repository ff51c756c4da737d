"""Putting a cache together: components mounted, pools built, books opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvgraft.config import CacheConfig, GuardMode, WritePolicy
from kvgraft.dispatch import Mounted, mount
from kvgraft.errors import ConfigError
from kvgraft.pools import BuildContext
from kvgraft.registry import Plugin, select
from kvgraft.transfers import CpuTransferEngine, TransferEngine
from kvgraft.tree.ledger import Ledger
from kvgraft.tree.track import ordered
from kvgraft.tree.tree import Tree
from kvgraft.types import Tier

if TYPE_CHECKING:
    from kvgraft.cache import Cache
    from kvgraft.guard import Guard

__all__ = ["build_books", "build_guard", "default_engine", "mount_all"]


def mount_all(config: CacheConfig, plugins: Sequence[Plugin]) -> list[Mounted]:
    """The configured components, built, in the tree's order.

    Args:
        config: names the components, as `package` or `package@label`.
        plugins: packages used instead of installed ones of the same name.

    Raises:
        ConfigError: a component that is not installed, or an empty label.
        PluginError: one that cannot be used.
    """
    names = list(config.components)
    packages = {name: _package(name) for name in names}
    available = {plugin.name: plugin for plugin in plugins}
    wanted = dict.fromkeys(packages.values())
    available |= {each.name: each for each in select([n for n in wanted if n not in available])}
    _check_device(config.device)
    context = BuildContext(
        page_size=config.page_size,
        device=config.device,
        device_tokens=config.device_tokens,
        host_tokens=config.host_tokens,
        pin_host=torch.device(config.device).type == "cuda",
    )
    mounted = {}
    for name in names:
        plugin = replace(available[packages[name]], name=name)
        mounted[name] = mount(plugin, config.components[name], context, _wrappers(plugin, config))
    return [mounted[shape.name] for shape in ordered([each.shape for each in mounted.values()])]


def _package(name: str) -> str:
    """The package of a component; what follows an @ tells its instances apart."""
    package, at, label = name.partition("@")
    if at and not (package and label):
        raise ConfigError(f"component {name!r}: write package@label, both parts named")
    return package


def _wrappers(plugin: Plugin, config: CacheConfig) -> list[object]:
    """What runs around a component's hooks."""
    if config.guard is GuardMode.OFF:
        return []
    from kvgraft.guard import HookGuard

    return [HookGuard(plugin, ask_twice=config.guard is GuardMode.ON)]


def build_guard(cache: Cache) -> Guard | None:
    """What watches the cache's operations from now on, if its configuration asks for it."""
    if cache.config.guard is GuardMode.OFF:
        return None
    from kvgraft.guard import watch

    return watch(cache)


def _check_device(name: str) -> None:
    """Refuse a device torch does not know, or that this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device {name!r}: {reason}; use cpu or cuda") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r}: no CUDA device here; use cpu")


def build_books(
    config: CacheConfig, mounted: Sequence[Mounted]
) -> tuple[Tree, list[tuple[Ledger, ...]]]:
    """The tree over the components' pools, and the ledgers of their private pools."""
    device = {
        each.name: Ledger(each.name, Tier.DEVICE, each.component.device.allocator)
        for each in mounted
    }
    host = {
        each.name: Ledger(each.name, Tier.HOST, each.component.host.allocator)
        for each in mounted
        if each.component.host is not None
    }
    private = [
        tuple(Ledger(each.name, Tier.DEVICE, pool.allocator) for pool in each.component.private)
        for each in mounted
    ]
    tree = Tree(
        config.page_size,
        [each.shape for each in mounted],
        device,
        host,
        prefix_closed_host=config.write_policy is not WritePolicy.WRITE_BACK,
    )
    return tree, private


def default_engine(config: CacheConfig) -> TransferEngine:
    """Worker threads for CPU pools, side streams for CUDA pools."""
    if torch.device(config.device).type == "cuda":
        from kvgraft.transfers.cuda import CudaTransferEngine

        return CudaTransferEngine(config.device)
    return CpuTransferEngine()
