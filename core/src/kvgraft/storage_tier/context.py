"""Objects that storing and fetching share."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.requests.eviction import Evictor
from kvgraft.storage import Storage
from kvgraft.storage_tier.naming import Naming
from kvgraft.storage_tier.slabs import Slabs
from kvgraft.storage_tier.touching import Touching
from kvgraft.tree.tree import Tree

__all__ = ["TierContext"]


class TierContext(NamedTuple):
    """The parts of one cache that its storage tier works with.

    Attributes:
        evictor: makes room on HOST.
        deadline_s: longest time for a call of the store.
    """

    tree: Tree
    evictor: Evictor
    client: Storage
    naming: Naming
    slabs: Slabs
    touching: Touching
    deadline_s: float
