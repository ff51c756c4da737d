"""The guard: the contract's rules, checked while a cache serves.

Switched on by configuration, `CacheConfig(guard="on")`; `docs/guard.md` lists its checks and its
cost. When it is off, none of its code is loaded.
"""

from __future__ import annotations

from kvgraft_guard.failing import GuardError
from kvgraft_guard.hooks import HookGuard
from kvgraft_guard.parts import GuardedPartsFactory
from kvgraft_guard.rules import GUARDED
from kvgraft_guard.watching import Guard

__all__ = ["GUARDED", "Guard", "GuardError", "GuardedPartsFactory", "HookGuard"]
