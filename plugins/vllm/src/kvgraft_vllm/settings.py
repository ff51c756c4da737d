"""Settings of the tier: the keys beside `type` and `module_path` in vLLM's configuration.

    {"type": "KvgraftTier", "module_path": "kvgraft_vllm.tier",
     "backend": "file", "path": "/var/cache/kvgraft", "capacity": "40GB"}

Other options are the backend's.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvgraft import Nbytes
from kvgraft_storage import StoreSettings

__all__ = ["TierSettings"]


class TierSettings(StoreSettings):
    """A tier: its store, as in `StoreSettings`, and how vLLM uses it.

    Attributes:
        lookup_timeout_s: longest time for which a request waits for a lookup in the store.
        store_nbytes: most bytes on their way to the store, which vLLM's CPU memory holds meanwhile;
            chunks beyond it are not stored, and counted.
        log_requests: log a line per request that says how much came from the store and why its hit
            ended.
        enable_kv_events: report to vLLM's KV events which chunks the store takes and drops.
        locality: `LOCAL` or `REMOTE`, for vLLM's filters and events.
    """

    adapter: ClassVar[str] = "kvgraft-vllm"

    lookup_timeout_s: float = Field(default=1.0, gt=0)
    store_nbytes: Nbytes = Field(default=1 << 30, ge=1)
    log_requests: bool = True
    enable_kv_events: bool = False
    locality: str | None = Field(default=None, pattern="^(LOCAL|REMOTE)$")
