"""The events of a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraft.requests.hits import Loaded
from kvgraft.stats import SlotHits
from kvgraft.tree.component import Cause, TreeComponent
from kvgraft.types import Tier
from kvgraft_observe.events.pages import Pages

__all__ = ["Cleared", "Event", "Evicted", "Hit", "Moved", "Stored"]


class Stored(NamedTuple):
    """Data is on a tier now: it was computed, or it was there before the stream began.

    Attributes:
        component: the component whose data it is.
        tier: DEVICE or HOST.
        pages: its pages; a state belongs to the last page before its boundary.
    """

    component: str
    tier: Tier
    pages: Pages


class Moved(NamedTuple):
    """Data was copied to a tier; the source keeps it until an `Evicted` says otherwise.

    Attributes:
        component: the component whose data it is.
        tier: DEVICE or HOST.
        source: the tier it came from; STORAGE for prefetched data.
        pages: its pages; a state belongs to the last page before its boundary.
    """

    component: str
    tier: Tier
    source: Tier
    pages: Pages


class Evicted(NamedTuple):
    """Data is no longer on a tier.

    Attributes:
        component: the component whose data it is.
        tier: DEVICE or HOST.
        cause: why: `demoted`, `deleted`, `cascade`, `leaf`, `cleared`, as in `PoolStats.evicted`.
        pages: its pages; a state belongs to the last page before its boundary.
    """

    component: str
    tier: Tier
    cause: Cause
    pages: Pages


class Hit(NamedTuple):
    """A request was admitted and resumes from cached data.

    Attributes:
        namespace: the request's.
        prompt: tokens of its prompt.
        device: prompt tokens that are resumed from DEVICE alone.
        host: prompt tokens that HOST had.
        storage: prompt tokens that HOST had because they were prefetched from STORAGE for this
            request.
        n_pages: pages of the prefix that it resumes from.
        loaded: the part of it that is loaded back.
        components: the components, for `slots`.
    """

    namespace: object
    prompt: int
    device: int
    host: int
    storage: int
    n_pages: int
    loaded: Loaded
    components: Sequence[TreeComponent]

    @property
    def slots(self) -> dict[str, SlotHits]:
        """Per component, the slots it resumes from, by tier."""
        hits = self.loaded.hits(self.components, self.n_pages)
        return {component.name: of for component, of in zip(self.components, hits)}


class Cleared(NamedTuple):
    """Forget everything; a `Stored` follows for all data in the cache.

    The first event of every stream, and the first one after a loss. `Cache.clear` causes one if it
    leaves no data to be found; otherwise an `Evicted` for everything that it clears.

    Attributes:
        lost: events that were dropped so far.
    """

    lost: int


Event = Stored | Moved | Evicted | Hit | Cleared
