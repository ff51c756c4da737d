"""The caches the state machine drives: component sets over small pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvgraft import CacheConfig, Chunk, Leading, LoadModel, Reach, Trailing, WritePolicy
from kvgraft.cache import Cache
from kvgraft.registry import Plugin, select
from kvgraft.transfers import TransferEngine

from .brute_force import ModelComponent, Part
from .components import paged_plugin

__all__ = ["SETUPS", "Setup", "Sizes", "open_cache"]

_INSTALLED = {plugin.name: plugin for plugin in select(["full", "swa", "mamba", "hisparse"])}


@dataclass(frozen=True)
class Sizes:
    """What varies within a setup; pages unless named otherwise."""

    page_size: int = 2
    policy: WritePolicy = WritePolicy.WRITE_THROUGH
    load: LoadModel | None = None
    device: int = 14
    host: int = 16


Options = Callable[[Sizes], dict[str, Any]]


@dataclass(frozen=True)
class Setup:
    """A set of components, for the cache and for the model.

    Attributes:
        name: for test ids.
        components: as the model knows them.
        options: per component, its options for given sizes.
        plugins: those that are not installed.
    """

    name: str
    components: tuple[ModelComponent, ...]
    options: dict[str, Options]
    plugins: dict[str, Plugin] = field(default_factory=dict)

    @property
    def has_state(self) -> bool:
        return any(component.is_state for component in self.components)


WINDOW = 5
FULL = ModelComponent("full", (Part("all"),))
SWA = ModelComponent("swa", (Part("last", WINDOW),))
MAMBA = ModelComponent("mamba", (Part("state"),))
HISPARSE = ModelComponent("hisparse", (Part("all"),), home_is_host=True)


def _attention(sizes: Sizes) -> dict[str, Any]:
    return {"n_layers": 1}


def _swa(sizes: Sizes) -> dict[str, Any]:
    window = -(-WINDOW // sizes.page_size)
    return {
        "n_layers": 1,
        "window": WINDOW,
        "device_tokens": (sizes.device // 2 + window) * sizes.page_size,
        "host_tokens": sizes.host * 2 // 3 * sizes.page_size,
    }


def _mamba(sizes: Sizes) -> dict[str, Any]:
    return {
        "n_layers": 1,
        "states": 7,
        "host_states": 6,
        "conv_dim": 8,
        "checkpoint_interval_tokens": 4,
    }


def _hisparse(sizes: Sizes) -> dict[str, Any]:
    return {"n_layers": 1, "hot_tokens": 2 * sizes.page_size, "max_running": 3}


_OPTIONS: dict[str, Options] = {
    "full": _attention,
    "swa": _swa,
    "mamba": _mamba,
    "hisparse": _hisparse,
}


def _installed(*components: ModelComponent) -> Setup:
    names = [component.name for component in components]
    return Setup(
        "+".join(names),
        components,
        {name: _OPTIONS[name] for name in names},
        {name: _INSTALLED[name] for name in names},
    )


def _with_third_party(
    setup: str, installed: tuple[ModelComponent, ...], *own: tuple[ModelComponent, Plugin]
) -> Setup:
    plugins = {component.name: plugin for component, plugin in own}
    return Setup(
        setup,
        (*installed, *(component for component, _ in own)),
        {
            **{component.name: _OPTIONS[component.name] for component in installed},
            **{name: (lambda sizes: {}) for name in plugins},
        },
        {**plugins, **{component.name: _INSTALLED[component.name] for component in installed}},
    )


SINKS = (
    ModelComponent("sinks", (Part("first", 3), Part("last", 4))),
    paged_plugin("sinks", Reach(Leading(3), Trailing(4))),
)
CHUNKED = (ModelComponent("chunked", (Part("chunk", 6),)), paged_plugin("chunked", Reach(Chunk(6))))
QUARTERED = (
    ModelComponent("quartered", (Part("last", 7),), slots_per_page=4),
    paged_plugin("quartered", Reach(Trailing(7)), slots_per_page=4),
)
UNMIRRORED = (
    ModelComponent("unmirrored", (Part("last", 3),), mirrored=False),
    paged_plugin("unmirrored", Reach(Trailing(3)), mirrored=False),
)

SETUPS = {
    setup.name: setup
    for setup in (
        _installed(FULL),
        _installed(SWA),
        _installed(MAMBA),
        _installed(HISPARSE),
        _installed(FULL, SWA),
        _installed(FULL, MAMBA),
        _installed(SWA, MAMBA),
        _installed(FULL, SWA, MAMBA),
        _installed(FULL, SWA, MAMBA, HISPARSE),
        _with_third_party("sinks", (), SINKS),
        _with_third_party("chunked+mamba", (MAMBA,), CHUNKED),
        _with_third_party("full+quartered+sinks", (FULL,), QUARTERED, SINKS),
        _with_third_party("full+unmirrored+chunked", (FULL,), UNMIRRORED, CHUNKED),
    )
}


def open_cache(setup: Setup, sizes: Sizes, engine: TransferEngine) -> Cache:
    """A cache of the setup's components."""
    config = CacheConfig(
        components={name: options(sizes) for name, options in setup.options.items()},
        page_size=sizes.page_size,
        device_tokens=sizes.device * sizes.page_size,
        host_tokens=sizes.host * sizes.page_size,
        write_policy=sizes.policy,
        load=sizes.load,
        transfer_timeout_s=1e-3,
    )
    return Cache(config, plugins=list(setup.plugins.values()), transfers=engine)
