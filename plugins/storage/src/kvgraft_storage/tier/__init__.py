"""The STORAGE tier of a cache: data goes to a store, and comes back before a request runs.

tier            attach, detach, poll: the object `Cache.storage`
context         the parts of a cache that it uses
naming          page hashes on the tree's nodes, addresses in the store
slabs           HOST slots as memory a store reads and writes
storing         HOST to STORAGE, by policy
inventory       which boundaries could be resumed from, given each page's tiers
fetching        one prefetch at work, STORAGE to HOST
arriving        its data is inserted into the tree
prefetching     prefetches of queued requests: shared, bounded, ended by policy
touching        notifies the store of pages that DEVICE or HOST serves
snapshot        the tree's index as a file
restoring       fills HOST after a restart with the most recently used data
"""

from __future__ import annotations

from kvgraft_storage.tier.prefetching import Prefetch
from kvgraft_storage.tier.restoring import Restoring
from kvgraft_storage.tier.tier import StorageTier

__all__ = ["Prefetch", "Restoring", "StorageTier"]
