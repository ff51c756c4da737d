"""Guarded caches over the component sets of `tests.serving`."""

from __future__ import annotations

from random import Random
from typing import Any

from kvgraft import Cache, CacheConfig, WritePolicy
from kvgraft.config import GuardMode

from ..serving.engines import PromptEngine
from ..serving.setups import Setup

__all__ = ["small"]


def small(
    setup: Setup, random: Random, mode: GuardMode, **settings: Any
) -> tuple[Cache, PromptEngine]:
    """A cache in which only a few of the requests of a crowd fit."""
    sizes = {
        "mamba": {"states": random.choice([3, 6, 9])},
        "hisparse": {"max_running": 3},
        "swa": {"device_tokens": random.choice([14, 20, 28])},
    }
    engine = PromptEngine()
    config = CacheConfig(
        components={name: {**own, **sizes.get(name, {})} for name, own in setup.options.items()},
        page_size=random.choice([1, 2, 4]),
        device_tokens=random.choice([20, 30, 44]) * 2,
        host_tokens=random.choice([24, 96, 96]) * 2,
        write_policy=random.choice(list(WritePolicy)),
        load=None,
        transfer_timeout_s=1e-3,
        guard=mode,
        **settings,
    )
    return Cache(config, plugins=list(setup.plugins.values()), transfers=engine), engine
