"""Events of a cache: its residency, page by page, for routers and reports (V1 to V3).

pages       runs of pages, and their hashes, made when they are asked for
kinds       the events
recording   makes events of the tree's changes
stream      keeps them for one reader, which may lag or fail
residency   the resident pages, from events alone
"""

from __future__ import annotations

from kvgraft_observe.events.kinds import Cleared, Event, Evicted, Hit, Moved, Stored
from kvgraft_observe.events.pages import Pages
from kvgraft_observe.events.recording import Recorder
from kvgraft_observe.events.residency import Residency
from kvgraft_observe.events.stream import EventStream

__all__ = [
    "Cleared",
    "Event",
    "EventStream",
    "Evicted",
    "Hit",
    "Moved",
    "Pages",
    "Recorder",
    "Residency",
    "Stored",
]
