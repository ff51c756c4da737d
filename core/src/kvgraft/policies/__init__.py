"""Eviction policies: the order in which pools evict data that is not pinned.

The tree decides which victims are legal. A policy orders them, one order per pool and tier, and may
sort requests into classes by their prompts (K1 to K3).
"""

from kvgraft.policies.policy import EvictionPolicy, Hint, Order, Pool, Use

__all__ = ["EvictionPolicy", "Hint", "Order", "Pool", "Use"]
