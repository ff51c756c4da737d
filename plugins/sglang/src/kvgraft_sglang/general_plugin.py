"""The function that SGLang runs in each of its processes: entry point group `sglang.srt.plugins`.

It registers the tree and a hook, and imports nothing of SGLang's pools. Without
`--radix-cache-backend kvgraft` nothing changes.
"""

from __future__ import annotations

import os
from typing import Any

from kvgraft_sglang.tree_settings import BACKEND, TreeSettings

__all__ = ["install"]

ALLOCATORS = (
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    "._build_token_to_kv_pool_allocator"
)
"""Builds the allocators that are swapped."""


def install() -> None:
    """Register the tree as a backend of the radix cache, and swap its allocators when built."""
    from sglang.srt.mem_cache.registry import (
        register_radix_cache_backend,
        registered_radix_cache_backends,
    )
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if BACKEND in registered_radix_cache_backends():
        return
    register_radix_cache_backend(BACKEND, _make)
    HookRegistry.register(ALLOCATORS, _swap, HookType.AFTER)


def _make(context: Any) -> Any:
    """The factory that SGLang calls for `--radix-cache-backend kvgraft`."""
    import sglang

    from kvgraft_sglang.interface import TREE_INTERFACE

    TREE_INTERFACE.require_supported(sglang.__version__)
    from kvgraft_sglang.tree import KvgraftTree

    return KvgraftTree(context, TreeSettings.from_environment(os.environ))


def _swap(allocator: Any, *given: Any, **named: Any) -> Any:
    """The allocator that was built, or one over kvgraft's pools if that backend is chosen."""
    del given, named
    from sglang.srt.runtime_context import get_memory

    if get_memory().radix_cache_backend != BACKEND:
        return None
    from kvgraft_sglang.allocator import swapped

    return swapped(allocator)
