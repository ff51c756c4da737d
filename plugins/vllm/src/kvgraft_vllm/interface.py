"""The supported versions of vLLM, and the names and signatures that this package relies on.

vLLM calls this interface experimental and changes it between minor versions. An unknown version is
refused when the tier is loaded; a changed signature is named.
"""

from __future__ import annotations

from kvgraft_storage import EngineInterface

__all__ = ["INTERFACE", "MANAGER_INTERFACE"]

INTERFACE = EngineInterface(
    adapter="kvgraft-vllm",
    engine="vLLM",
    distribution="vllm",
    oldest=(0, 32),
    too_new=(0, 34),
    signatures={
        "SecondaryTierManager.__init__": (
            "self",
            "offloading_spec",
            "primary_kv_view",
            "tier_type",
            "backpressure_detector",
        ),
        "SecondaryTierManager.lookup": ("self", "key", "req_context"),
        "SecondaryTierManager.submit_store": ("self", "job_metadata"),
        "SecondaryTierManager.submit_load": ("self", "job_metadata"),
        "SecondaryTierManager.get_finished_jobs": ("self",),
        "SecondaryTierManager.touch": ("self", "keys", "req_context"),
        "SecondaryTierManager.on_new_request": ("self", "req_context"),
        "SecondaryTierManager.on_request_finished": ("self", "req_context"),
        "SecondaryTierManager.on_schedule_end": ("self", "context"),
        "SecondaryTierManager.take_events": ("self",),
        "SecondaryTierManager.get_stats": ("self",),
        "SecondaryTierManager.build_metric_definitions": ("extra_config",),
        "SecondaryTierManager.drain_jobs": ("self",),
        "SecondaryTierManager.shutdown": ("self",),
        "TransferJob": (
            "job_id",
            "keys",
            "chunk_ids",
            "is_promotion",
            "req_context",
            "submit_time",
        ),
        "JobResult": ("job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"),
        "RequestOffloadingContext": ("policy",),
        "OffloadingEvent": (
            "keys",
            "medium",
            "removed",
            "locality",
            "ownership",
            "removal_expected",
        ),
        "OffloadingCounterMetadata": ("documentation", "labelnames"),
        "OffloadingGaugeMetadata": ("documentation", "labelnames"),
    },
)

MANAGER_INTERFACE = EngineInterface(
    adapter="kvgraft-vllm",
    engine="vLLM",
    distribution="vllm",
    oldest=INTERFACE.oldest,
    too_new=INTERFACE.too_new,
    signatures={
        "KVCacheManager.get_computed_blocks": ("self", "request"),
        "KVCacheManager.allocate_slots": (
            "self",
            "request",
            "num_new_tokens",
            "num_new_computed_tokens",
            "new_computed_blocks",
            "num_lookahead_tokens",
            "num_external_computed_tokens",
            "delay_cache_blocks",
            "num_encoder_tokens",
            "full_sequence_must_fit",
            "reserved_blocks",
            "has_scheduled_reqs",
            "skip_zeroing_group_ids",
        ),
        "KVCacheManager.free": ("self", "request"),
        "KVCacheManager.get_blocks": ("self", "request_id"),
        "KVCacheManager.estimate_cached_tokens": ("self", "request"),
        "KVCacheManager.reset_prefix_cache": ("self",),
        "KVCacheManager.new_step_starts": ("self",),
        "KVCacheManager.cache_blocks": ("self", "request", "num_computed_tokens"),
        "KVCacheManager.remove_skipped_blocks": (
            "self",
            "request_id",
            "processed_computed_tokens",
            "num_prompt_tokens",
        ),
        "KVCacheManager.pop_blocks_for_free": ("self", "request"),
        "KVCacheManager.evict_blocks": ("self", "block_ids"),
        "KVCacheBlocks.get_block_ids": ("self", "allow_none", "group_ids"),
        "EngineCore.preprocess_add_request": ("self", "request"),
    },
)
"""Methods of vLLM's cache manager and engine that `kvgraft_vllm.manager` replaces."""
