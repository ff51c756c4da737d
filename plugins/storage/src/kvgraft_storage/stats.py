"""Counts of a cache's storage tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["StorageStats"]


class StorageStats(NamedTuple):
    """The storage tier. Names of events may be added.

    Attributes:
        prefetches: prefetches by event, and the tokens they brought.
        in_vain: why prefetches brought nothing, and how often.
        stores: nodes and slots sent to the store, by event.
        touches: uses that the store was notified of, by event.
        keys: keys asked of the store, by verb and status.
        prefetches_in_flight: prefetches under way.
        stores_in_flight: nodes on their way to the store, or waiting for it.
        breaker: the state of the store's circuit breaker; `"no store"` without one.
        abandoned_threads: threads abandoned because a store's call did not return.
        last_error: the store's last error; empty if there was none.
    """

    prefetches: Mapping[str, int]
    in_vain: Mapping[str, int]
    stores: Mapping[str, int]
    touches: Mapping[str, int]
    keys: Mapping[str, Mapping[str, int]]
    prefetches_in_flight: int
    stores_in_flight: int
    breaker: str
    abandoned_threads: int
    last_error: str
