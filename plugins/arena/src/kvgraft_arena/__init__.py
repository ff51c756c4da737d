"""One byte budget per tier: pools lease extents of it, and the boundary between them moves (K7).

extents     an arena: which pool leases how much, and moves from one to another
moving      slots of closed extents move to open ones
holders     the node that holds each slot
balance     decides where the boundary moves
shadows     hits that more bytes would have brought each pool
sums        numbers that name prefixes
tiers       the arenas of a cache
sizing      pools whose size is given in bytes
split       bytes among the pools, by need
resizing    slots and books of a pool whose boundary moves
reserved    memory that stays where it is while pools take and give back parts of it
"""

from __future__ import annotations

from kvgraft_arena.extents import Arena, ArenaPool
from kvgraft_arena.tiers import Arenas

__all__ = ["Arena", "ArenaPool", "Arenas"]
