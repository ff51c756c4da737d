"""A suite for tiers and stores below an engine, whoever wrote them.

    kvgraft check-tier pkg.mod:Class --option root_dir={directory}      the command line
    results = check_tier("pkg.mod:Class", {"root_dir": "{directory}"})  a list

One set of clauses over a thin driver per kind of tier: vLLM's `SecondaryTierManager`, SGLang's
`HiCacheStorage` and kvgraft's own stores. See `docs/check-tier.md`.
"""

from __future__ import annotations

from kvgraft_testing.tiers.checking import CheckedTier, check_tier
from kvgraft_testing.tiers.rules import TIER_RULES

__all__ = ["TIER_RULES", "CheckedTier", "check_tier"]
