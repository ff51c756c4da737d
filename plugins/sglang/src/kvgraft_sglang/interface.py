"""The supported version of SGLang, and the names and signatures that this package relies on.

SGLang changes this interface between patch versions. An unknown version is refused when the backend
is loaded; a changed signature is named.
"""

from __future__ import annotations

from kvgraft_storage import EngineInterface

__all__ = ["INTERFACE", "TREE_INTERFACE"]

INTERFACE = EngineInterface(
    adapter="kvgraft-sglang",
    engine="SGLang",
    distribution="sglang",
    oldest=(0, 5, 23),
    too_new=(0, 5, 24),
    signatures={
        "HiCacheStorage.register_mem_pool_host": ("self", "mem_pool_host"),
        "HiCacheStorage.register_mem_host_pool_v2": ("self", "host_pool", "host_pool_name"),
        "HiCacheStorage.on_host_pools_registered": ("self",),
        "HiCacheStorage.get": ("self", "key", "target_location", "target_sizes"),
        "HiCacheStorage.batch_get": ("self", "keys", "target_locations", "target_sizes"),
        "HiCacheStorage.set": ("self", "key", "value", "target_location", "target_sizes"),
        "HiCacheStorage.batch_set": ("self", "keys", "values", "target_locations", "target_sizes"),
        "HiCacheStorage.exists": ("self", "key"),
        "HiCacheStorage.batch_exists": ("self", "keys", "extra_info"),
        "HiCacheStorage.batch_get_v1": ("self", "keys", "host_indices", "extra_info"),
        "HiCacheStorage.batch_set_v1": ("self", "keys", "host_indices", "extra_info"),
        "HiCacheStorage.batch_exists_v2": ("self", "keys", "pool_transfers", "extra_info"),
        "HiCacheStorage.batch_get_v2": ("self", "transfers", "extra_info"),
        "HiCacheStorage.batch_set_v2": ("self", "transfers", "extra_info"),
        "HiCacheStorage.clear": ("self",),
        "HiCacheStorage.get_stats": ("self",),
        "HiCacheStorageConfig": (
            "tp_rank",
            "tp_size",
            "pp_rank",
            "pp_size",
            "attn_cp_rank",
            "attn_cp_size",
            "is_mla_model",
            "enable_storage_metrics",
            "is_page_first_layout",
            "model_name",
            "tp_lcm_size",
            "should_split_heads",
            "dp_rank",
            "extra_config",
            "dcp_size",
            "dcp_rank",
            "logical_page_size",
        ),
        "StorageMetrics": (
            "prefetch_pgs",
            "backup_pgs",
            "prefetch_bandwidth",
            "backup_bandwidth",
        ),
        "PoolTransferResult": (
            "kv_hit_pages",
            "extra_pool_hit_pages",
            "restorable_prefix_pages",
        ),
    },
)

TREE_INTERFACE = EngineInterface(
    adapter=INTERFACE.adapter,
    engine=INTERFACE.engine,
    distribution=INTERFACE.distribution,
    oldest=INTERFACE.oldest,
    too_new=INTERFACE.too_new,
    signatures={
        "BasePrefixCache.reset": ("self",),
        "BasePrefixCache.match_prefix": ("self", "params"),
        "BasePrefixCache.touch_prefix": ("self", "key"),
        "BasePrefixCache.checkpoint": ("self", "req", "up_to", "kwargs"),
        "BasePrefixCache.evict": ("self", "params"),
        "BasePrefixCache.lock": ("self", "node"),
        "BasePrefixCache.unlock": ("self", "lock"),
        "BasePrefixCache.inc_lock_ref": ("self", "node"),
        "BasePrefixCache.dec_lock_ref": ("self", "node", "params"),
        "BasePrefixCache.path_device_indices": ("self", "node"),
        "BasePrefixCache.free_kv_row": ("self", "kv", "ranges"),
        "TokenToKVPoolAllocator.alloc": ("self", "need_size"),
        "TokenToKVPoolAllocator.free": ("self", "free_index"),
        "PagedTokenToKVPoolAllocator.alloc_extend": (
            "self",
            "prefix_lens",
            "prefix_lens_cpu",
            "seq_lens",
            "seq_lens_cpu",
            "last_loc",
            "extend_num_tokens",
            "num_new_pages",
        ),
        "PagedTokenToKVPoolAllocator.alloc_decode": (
            "self",
            "seq_lens",
            "seq_lens_cpu",
            "last_loc",
        ),
        "PagedTokenToKVPoolAllocator._release_page_ids": ("self", "page_ids"),
        "SWATokenToKVPoolAllocator.set_full_to_swa_mapping": (
            "self",
            "full_indices",
            "swa_indices",
        ),
        "KVCacheConfigurator._build_token_to_kv_pool_allocator": (
            "self",
            "sizes",
            "token_to_kv_pool",
            "is_dsv4_model",
            "req_to_token_pool",
            "token_to_kv_pool_allocator",
        ),
        "register_radix_cache_backend": ("name", "factory"),
    },
)
"""Methods of SGLang's prefix cache and allocators that `kvgraft_sglang.tree` replaces."""
