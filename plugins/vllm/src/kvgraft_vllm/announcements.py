"""Translates changes of the store to vLLM's keys, for its KV events.

The store reports storage keys. The keys of vLLM that belong to them are kept for a bounded number
of chunks, the most recently used ones. Changes of others are not reported.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvgraft_storage import Address, Change, EventLog, StoreEvent

__all__ = ["Announcements"]

LIMIT = 1 << 18
"""Most chunks whose keys are kept, stored or on their way; 0.3 KiB each."""


class Announcements:
    """Translates the store's events.

    Args:
        log: the store's events.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._on_their_way: OrderedDict[bytes, bytes] = OrderedDict()
        self._announced: OrderedDict[bytes, bytes] = OrderedDict()

    def remember(self, keys: Iterable[bytes], addresses: Iterable[Address]) -> None:
        """Keep the keys of chunks that are on their way to the store."""
        for key, address in zip(keys, addresses):
            self._on_their_way[address.key] = key
        _bound(self._on_their_way)

    def take(self) -> list[tuple[bool, list[bytes]]]:
        """Changes in their order: whether keys were removed, and the keys."""
        told: list[tuple[bool, list[bytes]]] = []
        for event in self._log.take():
            gone, keys = self._read(event)
            if keys and told and told[-1][0] is gone:
                told[-1][1].extend(keys)
            elif keys:
                told.append((gone, keys))
        return told

    def _read(self, event: StoreEvent) -> tuple[bool, list[bytes]]:
        if event.change is Change.STORED:
            key = self._on_their_way.pop(event.key, None)
            if key is None:
                return False, []
            self._announced[event.key] = key
            _bound(self._announced)
            return False, [key]
        if event.change in (Change.CLEARED, Change.LOST):  # some or all are gone
            gone, self._announced = list(self._announced.values()), OrderedDict()
            return True, gone
        key = self._announced.pop(event.key, None)
        return True, [] if key is None else [key]


def _bound(keys: OrderedDict[bytes, bytes]) -> None:
    while len(keys) > LIMIT:
        keys.popitem(last=False)
