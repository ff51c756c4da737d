"""Several ranks of one model, with a cache each, that decide alike (D1 to D4).

opening      `Cache.open(..., ranks=group)`: opens on all ranks, or on none
cache        notes the result of every call
log          a digest of all results so far, and the last of them one by one
agreement    what no rank knows alone: ended copies and calls of stores, the clock
link         the process group: one gathering of messages of a fixed size
copies       transfers between DEVICE and HOST that end on all ranks at once
stores       calls of stores that end on all ranks alike
tier         the storage tier, with steps that are counted and not timed

Every rank makes the same calls in the same order. A decision reads the replicated state and what
was agreed, nothing else.
"""

from __future__ import annotations

from kvgraft_ranks.errors import RanksDivergedError, RanksError
from kvgraft_ranks.opening import open_on_ranks

__all__ = ["RanksDivergedError", "RanksError", "open_on_ranks"]
