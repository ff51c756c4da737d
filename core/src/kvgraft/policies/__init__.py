"""Eviction policies: the order in which pools give up what nobody holds.

The tree decides on legal victims. A policy orders them, one order per pool and tier, and may sort
requests into classes by what it knows of their prompts (K1 to K3).
"""

from kvgraft.policies.policy import EvictionPolicy, Hint, Order, Pool, Use

__all__ = ["EvictionPolicy", "Hint", "Order", "Pool", "Use"]
