"""Caches whose pools share one budget."""

from __future__ import annotations

from typing import Any

from kvgraft import Cache, CacheConfig
from kvgraft.config import parse_config
from kvgraft.requests.request import Request
from kvgraft.transfers import TransferEngine
from kvgraft.types import Tier
from kvgraft_arena import Arena

from ..serving import life

__all__ = ["MIXED", "PAGE", "arena_of", "opened", "prefilled"]

PAGE = 16
MIXED: dict[str, Any] = {
    "full": {"n_layers": 1, "n_kv_heads": 2, "head_dim": 64},
    "mamba": {"n_layers": 1, "conv_dim": 0, "n_heads": 8, "head_dim": 16, "state_dim": 16},
}
"""Pages of 8 KiB, states of 8 KiB: an extent of a budget of 4 MiB is eight of either."""


def opened(
    components: dict[str, Any] = MIXED, engine: TransferEngine | None = None, **settings: Any
) -> Cache:
    """A cache of 4 MiB for both pools, unless `settings` say otherwise."""
    given = {"page_size": PAGE, "device_memory": 4 << 20, "policy": "lru", "guard": "on"}
    given |= {"load": None, **settings}
    config: CacheConfig = parse_config({"components": components, **given})
    return Cache(config, transfers=engine)


def arena_of(cache: Cache, tier: Tier = Tier.DEVICE) -> Arena:
    assert cache.arenas is not None
    arena: Arena = cache.arenas.by_tier[tier]
    return arena


def prefilled(cache: Cache, first: int, n_tokens: int, reserve: int = 0) -> Request:
    """A request over tokens from `first` on that has computed its prompt."""
    return life.prefilled(cache, range(first, first + n_tokens), reserve=reserve)
