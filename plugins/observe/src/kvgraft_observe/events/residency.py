"""The residency that events describe, for a router or a report (V1, V2)."""

from __future__ import annotations

from collections.abc import Iterable

from kvgraft.errors import IntegrityError
from kvgraft.types import Tier
from kvgraft_observe.events.kinds import Cleared, Event, Evicted, Moved, Stored

__all__ = ["Residency"]


class Residency:
    """Pages by component and tier, kept by events alone.

    Attributes:
        pages: the hashes of resident pages, by component and tier; an empty pool has no entry.
    """

    def __init__(self) -> None:
        self.pages: dict[tuple[str, Tier], set[bytes]] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events, in their order.

        Raises:
            IntegrityError: data arrives that is there already, or data leaves that is not there
                (V1).
        """
        for event in events:
            if isinstance(event, Cleared):
                self.pages.clear()
            elif isinstance(event, (Stored, Moved)):
                there = self.pages.setdefault((event.component, event.tier), set())
                for page in event.pages.hashes:
                    if page in there:
                        raise _misfit(event, "is there already")
                    there.add(page)
            elif isinstance(event, Evicted):
                there = self.pages.get((event.component, event.tier), set())
                for page in event.pages.hashes:
                    if page not in there:
                        raise _misfit(event, "is not there")
                    there.remove(page)
                if not there:
                    self.pages.pop((event.component, event.tier), None)

    def depth(self, component: str, tier: Tier, hashes: Iterable[bytes]) -> int:
        """How many of the pages of a sequence, from its first on, a component has on a tier."""
        there, found = self.pages.get((component, tier), set()), 0
        for page in hashes:
            if page not in there:
                break
            found += 1
        return found


def _misfit(event: Stored | Moved | Evicted, said: str) -> IntegrityError:
    return IntegrityError(
        "V1",
        event.component,
        f"{type(event).__name__} of {event.pages!r} on {event.tier.value}: a page {said}; begin "
        "again with a new stream",
    )
