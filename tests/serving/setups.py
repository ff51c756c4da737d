"""Component sets, and caches over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvgraft import (
    CacheConfig,
    Chunk,
    GuardMode,
    Leading,
    LoadModel,
    Reach,
    Trailing,
    WritePolicy,
)
from kvgraft.assembly import PartsFactory, parts_of
from kvgraft.cache import Cache
from kvgraft.packages.registry import Plugin, load_plugin, select
from kvgraft.transfers import TransferEngine
from kvgraft_storage.settings import StorageSettings

from .components import PagedPackage, StatePackage

__all__ = ["SETUPS", "Setup", "installed", "mixed", "one_of_each_kind"]

INSTALLED = {plugin.name: plugin for plugin in select(["full", "swa", "mamba", "hisparse"])}
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "swa": {"window": 6},
    "mamba": {"states": 16, "host_states": 16},
    "hisparse": {"hot_tokens": 4, "max_running": 8},
}


@dataclass(frozen=True)
class Setup:
    """A set of components.

    Attributes:
        name: for test ids.
        options: per component.
        plugins: per component.
    """

    name: str
    options: dict[str, dict[str, Any]]
    plugins: dict[str, Plugin] = field(default_factory=dict)

    def open(
        self,
        *,
        page_size: int = 2,
        device_tokens: int = 64,
        host_tokens: int = 128,
        policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        eviction: str = "lru",
        load: LoadModel | None = None,
        engine: TransferEngine | None = None,
        timeout_s: float = 5.0,
        storage: StorageSettings | None = None,
        guard: GuardMode = GuardMode.OFF,
        decode_interval_tokens: int = 0,
        parts: Callable[[CacheConfig], PartsFactory] = parts_of,
        **options: dict[str, Any],
    ) -> Cache:
        """A cache; keyword arguments named like components are further options of theirs."""
        components = {name: {**own, **options.get(name, {})} for name, own in self.options.items()}
        config = CacheConfig(
            components=components,
            page_size=page_size,
            device_tokens=device_tokens,
            host_tokens=host_tokens,
            policy=eviction,
            write_policy=policy,
            load=load,
            transfer_timeout_s=timeout_s,
            storage=storage,
            guard=guard,
            decode_interval_tokens=decode_interval_tokens,
        )
        return Cache(
            config,
            plugins=list(self.plugins.values()),
            transfers=engine,
            parts=parts(config),
        )


def installed(*names: str) -> Setup:
    """Components that come with kvgraft."""
    return Setup("+".join(names), {n: OPTIONS[n] for n in names}, {n: INSTALLED[n] for n in names})


def mixed(names: tuple[str, ...], *packages: PagedPackage | StatePackage) -> Setup:
    """Installed components beside third-party ones."""
    own = {package.name: load_plugin(package.name, package) for package in packages}
    base = installed(*names)
    return Setup(
        "+".join((*names, *own)),
        {**base.options, **{name: {} for name in own}},
        {**base.plugins, **own},
    )


SINKS = PagedPackage("sinks", Reach(Leading(3), Trailing(5)))
CHUNKED = PagedPackage("chunked", Reach(Chunk(8)))
QUARTERED = PagedPackage("quartered", Reach(Trailing(7)), slots_per_page=4)
SSM = StatePackage("ssm")

SETUPS = {
    setup.name: setup
    for setup in (
        installed("full"),
        installed("swa"),
        installed("hisparse"),
        installed("full", "swa"),
        installed("full", "mamba"),
        installed("full", "swa", "mamba"),
        mixed((), SINKS),
        mixed(("full",), SINKS),
        mixed(("full",), CHUNKED),
        mixed(("full",), QUARTERED, SSM),
        mixed(("swa",), SSM),
        mixed(("hisparse",), SINKS),
    )
}

QUICK = ("full", "full+swa+mamba", "full+quartered+ssm", "hisparse+sinks")
"""Pages alone, windows and states beside them, several slots a page, and a home on HOST."""


def one_of_each_kind() -> list[Any]:
    """Parameters of which all but one of each kind are left to the long tests."""
    return [
        pytest.param(setup, id=name, marks=() if name in QUICK else pytest.mark.long)
        for name, setup in SETUPS.items()
    ]
