"""kvgraft's stores as a tier of vLLM's KV cache, below its GPU and CPU memory.

settings           the tier's entry in vLLM's `secondary_tiers`
identity           the fingerprint: everything about the data that vLLM's block hashes do not say
store_tier         the tier without vLLM: lookups, transfers, and what is reported about them
engine, interface  what is read from vLLM, which versions of it, and the signatures relied on
tier               the class that vLLM loads; the only module that imports vLLM

Importing this package imports neither vLLM nor torch.
"""

from __future__ import annotations

from kvgraft_vllm.identity import Engine, Group
from kvgraft_vllm.settings import TierSettings
from kvgraft_vllm.store_tier import StoreTier

__all__ = ["Engine", "Group", "StoreTier", "TierSettings"]
