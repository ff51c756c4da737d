"""kvgraft inside vLLM's scheduler, and its stores as a tier below vLLM's GPU and CPU memory.

general_plugin     run by vLLM in each process; puts the manager in where it is turned on
manager_settings   the environment variable that turns it on, with its settings
block_layout       vLLM's blocks, shared out to components
manager            kvgraft in the place of vLLM's `KVCacheManager`

settings           the tier's entry in vLLM's `secondary_tiers`
identity           the fingerprint: everything about the data that vLLM's block hashes do not say
store_tier         the tier without vLLM: lookups, transfers, and what is reported about them
engine, interface  what is read from vLLM, which versions of it, and the signatures relied on
tier               the class that vLLM loads; with `manager` the only modules that import vLLM

Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from kvgraft_vllm.identity import Engine, Group
from kvgraft_vllm.settings import TierSettings
from kvgraft_vllm.store_tier import StoreTier

__all__ = ["Engine", "Group", "StoreTier", "TierSettings"]
