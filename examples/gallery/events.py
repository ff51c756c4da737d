"""Events: a router learns which pages of which prompts a cache has, and on which tier.

kvgraft-full, kvgraft-observe
"""

from collections import Counter

from kvgraft import Cache, Tier, TokenKey
from kvgraft_observe.events import Event, Evicted, Moved, Stored


class Router:
    """Knows pages by hash: equal prefixes have equal hashes in every process."""

    def __init__(self) -> None:
        self.tiers: dict[bytes, set[Tier]] = {}

    def take(self, events: list[Event]) -> None:
        """Called by `poll`, on the engine's thread."""
        for event in events:
            if not isinstance(event, Stored | Moved | Evicted):
                continue
            for page in event.pages.hashes:
                tiers = self.tiers.setdefault(page, set())
                if isinstance(event, Evicted):
                    tiers.discard(event.tier)
                else:
                    tiers.add(event.tier)

    def counts(self) -> dict[str, int]:
        """Number of pages by the tiers that have them."""
        names = ("+".join(sorted(tier.name for tier in each)) for each in self.tiers.values())
        return dict(Counter(names))


router = Router()
with Cache.open(["full"], page_size=16, device_tokens=2048, host_tokens=8192) as cache:
    cache.observe(router.take)
    for first in 0, 10_000, 20_000:  # each pushes the one before it to the host
        request = cache.begin(TokenKey(range(first, first + 1600)))
        assert cache.admit(request).admitted
        cache.allocate(request, 1600)
        cache.computed(request, 1600)
        cache.finish(request)
        cache.drain()
        cache.poll()
        print(router.counts())
