"""kvgraft inside vLLM's scheduler, and its stores as a tier below vLLM's GPU and CPU memory.

general_plugin     run by vLLM in each process; installs the manager if it is on
manager_settings   the environment variable that turns it on, with its settings
block_layout       vLLM's blocks, divided among components
manager            kvgraft instead of vLLM's `KVCacheManager`
metrics_server     kvgraft's metrics, on a port of their own

settings           the tier's entry in vLLM's `secondary_tiers`
identity           the fingerprint: facts about the data that are not in vLLM's block hashes
store_tier         the tier without vLLM: lookups, transfers, and reports about them
engine, interface  facts read from vLLM, supported versions, and required signatures
tier               the class that vLLM loads; with `manager` the only modules that import vLLM

Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from kvgraft_vllm.identity import Engine, Group
from kvgraft_vllm.settings import TierSettings
from kvgraft_vllm.store_tier import StoreTier

__all__ = ["Engine", "Group", "StoreTier", "TierSettings"]
