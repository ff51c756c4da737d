"""The caches the state machine drives: component sets over small pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvgraft.assembly import parts_of
from kvgraft.cache import Cache
from kvgraft.config import CacheConfig, GuardMode, WritePolicy
from kvgraft.devices import SIMULATED
from kvgraft.packages.registry import Plugin, select
from kvgraft.transfers import TransferEngine
from kvgraft.types import Tier
from kvgraft_arena.sizing import planned_nbytes
from kvgraft_retention.settings import TenantSettings
from kvgraft_storage.settings import PrefetchPolicy, StorageSettings, StorePolicy
from kvgraft_testing.machine.accelerators import PromptedAcceleratorEngine
from kvgraft_testing.machine.components import (
    REFERENCE_OPTIONS,
    narrow_window,
    references,
)
from kvgraft_testing.machine.engines import PromptedTransferEngine
from kvgraft_testing.machine.hooks import Hooks
from kvgraft_testing.machine.keeping import (
    BY_AGE,
    BY_AGE_UNLEARNT,
    BY_PRIORITY,
    BY_TERM,
    Keeping,
)
from kvgraft_testing.machine.sizes import Options, Sizes
from kvgraft_testing.machine.stores import PartsWithStore
from kvgraft_testing.machine.streams import PromptedStreamEngine

__all__ = ["Setup", "drawn_setups", "engine_for", "open_cache", "setup_for", "setups_for"]


@dataclass(frozen=True)
class Setup:
    """A set of components.

    Attributes:
        name: for test ids and reports.
        options: per component, its options. Their pool sizes override the cache's.
        plugins: the packages; others are taken from those installed.
        page_sizes: tokens per page to try; sizes that components refuse are left out.
        keeping: the eviction policy.
        shared: whether the pools of a tier share one budget, so that boundaries move (K7).
        tenants: settings of tenants that share the pools; none by default.
        device: the name of the caches' device: `"cpu"`, `"simulated"`, or one that torch has.
        sweep_steps: steps in which cleared data is freed, each of a node; None for the usual
            number, more than such a tree needs.
        stored: whether there is a store behind HOST, whose calls end when the test says so.
        guarded: whether the guard checks every call, too.
        drawn: whether each example draws the settings not given here: tenants, a shared budget,
            priorities and times to live, a store (`drawn_setups`).
    """

    name: str
    options: Mapping[str, Options]
    plugins: Mapping[str, Plugin] = field(default_factory=dict)
    page_sizes: tuple[int, ...] = (1, 2, 4)
    keeping: Keeping = BY_AGE
    shared: bool = False
    tenants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    device: str = "cpu"
    sweep_steps: int | None = None
    stored: bool = False
    guarded: bool = False
    drawn: bool = False

    def shown(self, sizes: Sizes) -> list[str]:
        """The components by name, with options that depend on the sizes."""
        return [
            f"{name} {dict(options(sizes))}" if callable(options) and options(sizes) else name
            for name, options in self.options.items()
        ]


TENANTS: Mapping[str, Mapping[str, Any]] = {
    "a": {"namespaces": ["tenant"], "guarantee": 0.4, "weight": 2},
    "default": {"guarantee": 0.3},
}
"""Two tenants, one of them with a weight."""

LIMITED: Mapping[str, Mapping[str, Any]] = {
    "a": {"prefixes": ["t"], "guarantee": 0.2, "limit": 0.6, "weight": 0.5},
    "b": {"prefixes": ["tenant"], "limit": 0.7, "host_limit": 0.5},
    "c": {"namespaces": ["", 0], "guarantee": 0.2},
}
"""Tenants with prefixes of namespaces, some with a limit."""

DRAWN: tuple[Mapping[str, Any], ...] = (
    {"guarded": True},
    {"keeping": BY_AGE_UNLEARNT, "tenants": TENANTS, "guarded": True},
    {"keeping": BY_TERM, "guarded": True},
    {"shared": True, "sweep_steps": 3, "guarded": True},
    {"keeping": BY_PRIORITY, "sweep_steps": 3, "guarded": True},
    {"tenants": LIMITED, "keeping": BY_TERM, "guarded": True},
    {"shared": True, "keeping": BY_PRIORITY, "guarded": True},
    {"keeping": BY_AGE_UNLEARNT, "shared": True, "guarded": True},
    {"keeping": BY_AGE_UNLEARNT, "stored": True},
    {"stored": True, "tenants": TENANTS},
)
"""Settings that examples draw beside the components."""


def drawn_setups(setup: Setup) -> tuple[Setup, ...]:
    """The setups of which an example draws one: itself, or those of `DRAWN`."""
    if not setup.drawn:
        return (setup,)
    return tuple(replace(setup, **changed) for changed in DRAWN)


def setup_for(
    components: Sequence[str | Plugin],
    options: Mapping[str, Options] | None = None,
    beside: Sequence[str | Plugin] = (),
) -> Setup:
    """A component set of installed names and given packages.

    Args:
        components: the components under test.
        options: per component, its options; none by default.
        beside: companions, such as `references()`, which have small options of their own.

    Raises:
        ConfigError: a name that is not installed.
        PluginError: one that is installed and cannot be used.
    """
    given = [
        each if isinstance(each, Plugin) else select([each])[0] for each in (*components, *beside)
    ]
    asked = {**REFERENCE_OPTIONS, **(options or {})}
    return Setup(
        "+".join(each.name for each in given),
        {each.name: asked.get(each.name, {}) for each in given},
        {each.name: each for each in given},
    )


def setups_for(
    plugin: str | Plugin, options: Options | None = None, *, alone: bool = True
) -> list[Setup]:
    """One component in all companies: alone, beside one other kind, beside three.

    Args:
        plugin: the package, or the name of an installed one.
        options: its options.
        alone: whether it can be alone; not if its reach does not end at every boundary.

    Raises:
        ConfigError: a name that is not installed.
        PluginError: one that is installed and cannot be used.
    """
    loaded = plugin if isinstance(plugin, Plugin) else select([plugin])[0]
    everything, window, state = references()
    if hasattr(loaded.implementation, "acquire_component_lock"):
        window = narrow_window()
    companies = [(everything,), (window, state), (everything, window, state)]
    return [
        replace(setup_for([loaded], {loaded.name: options or {}}, company), drawn=True)
        for company in ([(), *companies] if alone else companies)
    ]


def engine_for(device: str) -> PromptedTransferEngine:
    """The engine of caches on a device, with the device; see `Setup`.

    Raises:
        ConfigError: torch has it not here, or not its streams.
    """
    if device == "cpu":
        return PromptedTransferEngine()
    return PromptedStreamEngine() if device == SIMULATED else PromptedAcceleratorEngine(device)


GUARDED = {"guard": GuardMode.SAMPLED, "guard_sample": 1.0, "guard_full_check": 10**9}
"""The guard checks every call; the machine itself recomputes the books."""

PIN_SHARE = 0.5
"""Of pools of some ten pages."""

STORED = {
    WritePolicy.WRITE_THROUGH: StorePolicy.WRITE_THROUGH,
    WritePolicy.WRITE_THROUGH_SELECTIVE: StorePolicy.SECOND_TOUCH,
    WritePolicy.WRITE_BACK: StorePolicy.HOST_EVICTION,
}

QUEUE_TIMEOUT_S = 60.0
"""Calls of the machine for which fetched data is kept for its request."""


def open_cache(
    setup: Setup,
    sizes: Sizes,
    engine: TransferEngine,
    hooks: Hooks | None = None,
    clock: Callable[[], float] | None = None,
) -> Cache:
    """A cache of the setup's components.

    Args:
        setup: the components.
        sizes: page size, policy and pools.
        engine: runs the copies.
        hooks: notes the hook calls; by default none does.
        clock: of its times to live; by default the machine's.

    Raises:
        ConfigError: a component that is not installed, or sizes that cannot work.
        PluginError: options that a component refuses.
    """
    config = CacheConfig(
        components={
            name: dict(options(sizes) if callable(options) else options)
            for name, options in setup.options.items()
        },
        page_size=sizes.page_size,
        device_tokens=sizes.device * sizes.page_size,
        host_tokens=sizes.host * sizes.page_size,
        write_policy=sizes.policy,
        pin_share=PIN_SHARE,
        load=sizes.load,
        cut_tokens=sizes.cut_tokens,
        decode_interval_tokens=sizes.decode_tokens,
        max_drafts=sizes.max_drafts,
        transfer_timeout_s=1e-3,
        device=setup.device,
        tenants={name: TenantSettings.model_validate(each) for name, each in setup.tenants.items()},
    )
    if setup.stored:
        config = config.model_copy(update={"storage": storage_settings(sizes)})
    plugins = list(setup.plugins.values())
    if setup.shared:
        config = _sharing(config, plugins)
    if setup.guarded:
        config = config.model_copy(update=GUARDED)
    if hooks is not None:
        plugins = [hooks.watch(plugin) for plugin in plugins]
    parts = PartsWithStore(config) if setup.stored else parts_of(config)
    if clock is not None:
        parts.clock = clock
    parts.policy = setup.keeping.make()
    if isinstance(engine, PromptedTransferEngine) and engine.runtime is not None:
        parts.runtime = engine.runtime
    return Cache(config, plugins=plugins, transfers=engine, parts=parts, clock=clock)


def storage_settings(sizes: Sizes) -> StorageSettings:
    """Settings of a store, whose policy follows the time at which HOST gets data."""
    return StorageSettings(
        model="the machine's",
        weights="none",
        store=STORED[sizes.policy],
        prefetch=PrefetchPolicy.WAIT_COMPLETE,
        threshold_tokens=sizes.page_size,
        queue_timeout_s=QUEUE_TIMEOUT_S,
    )


def _sharing(config: CacheConfig, plugins: Sequence[Plugin]) -> CacheConfig:
    """The same pools at first, under one budget for each tier with a little more to give."""
    nbytes = planned_nbytes(config, plugins)
    budgets = {f"{tier.value}_memory": nbytes[tier] * 5 // 4 for tier in (Tier.DEVICE, Tier.HOST)}
    return config.model_copy(update={name: room for name, room in budgets.items() if room})
