"""The supported version of SGLang, and the names and signatures that this package relies on.

SGLang changes this interface between patch versions. An unknown version is refused when the backend
is loaded; a changed signature is named.
"""

from __future__ import annotations

from kvgraft_storage import EngineInterface

__all__ = ["INTERFACE"]

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
