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
    """Data is on a tier now: it was computed, or was there before the reader began to listen.

    Attributes:
        component: whose.
        tier: DEVICE or HOST.
        pages: of which pages; a state is that of the last page before its boundary.
    """

    component: str
    tier: Tier
    pages: Pages


class Moved(NamedTuple):
    """Data is on a tier now, copied from another, which has it until an `Evicted` says otherwise.

    Attributes:
        component: whose.
        tier: DEVICE or HOST.
        source: the tier it came from; STORAGE of prefetched data.
        pages: of which pages; a state is that of the last page before its boundary.
    """

    component: str
    tier: Tier
    source: Tier
    pages: Pages


class Evicted(NamedTuple):
    """Data is on a tier no more.

    Attributes:
        component: whose.
        tier: DEVICE or HOST.
        cause: why: `demoted`, `deleted`, `cascade`, `leaf`, `cleared`, as in `PoolStats.evicted`.
        pages: of which pages; a state is that of the last page before its boundary.
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
        device: those of them that are resumed from DEVICE alone.
        host: those that HOST had.
        storage: those that HOST had because STORAGE brought them for this request.
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
    """Forget everything; a `Stored` follows for all data there is.

    The first event of every stream, and the first one after a loss. `Cache.clear` gives one where
    it leaves no data to be found; otherwise an `Evicted` for all that it clears.

    Attributes:
        lost: events that the reader will never get, so far.
    """

    lost: int


Event = Stored | Moved | Evicted | Hit | Cleared
