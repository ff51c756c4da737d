"""Objects that storing and fetching share."""

from __future__ import annotations

from typing import NamedTuple

from kvgraft.requests.eviction import Evictor
from kvgraft.tree.tree import Tree
from kvgraft_storage import Storage
from kvgraft_storage.tier.naming import Naming
from kvgraft_storage.tier.slabs import Slabs
from kvgraft_storage.tier.touching import Touching

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
