"""The versions of vLLM this is written for, and the names and signatures of it that are relied on.

vLLM calls this interface experimental and changes it between minor versions. A version that is not
known is refused when the tier is loaded; another signature is named.
"""

from __future__ import annotations

from kvgraft_storage import EngineInterface

__all__ = ["INTERFACE"]

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
