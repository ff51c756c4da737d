"""Readers of the cache's events beside the tree: a good one, one that lags, one that fails.

Each applies events by code of its own: `kvgraft_observe.events.Residency` is not used. The model
names pages by namespace and all tokens up to their end; their hashes are made from these.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvgraft.cache import Cache
from kvgraft.parts import EventStream
from kvgraft_observe.events import Cleared, Event, Evicted, Hit, Moved, Stored
from kvgraft_observe.events.pages import root_of
from kvgraft_testing.machine.brute_force import Gone, Prefix
from kvgraft_testing.machine.judging import Judge, ReaderError
from kvgraft_testing.machine.observing import Snapshot

__all__ = ["Watching"]

ROUND, SILENT = 16, 2
"""Calls of a round; in the first ones there is no reader."""

EVERY = 5
"""Calls after which the lagging reader reads."""

ROOM = 12
"""Events that may wait for it."""

FAILS = 3
"""The other observer raises at every delivery of this number."""


class Names:
    """The hashes that events should give pages, from the definition."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._hashes: dict[Prefix, bytes] = {}

    def of(self, page: Prefix) -> bytes:
        """The hash of a page, named by its namespace and all tokens up to its end."""
        found = self._hashes.get(page)
        if found is None:
            namespace, tokens = page
            before = (namespace, tokens[: -self.size])
            parent = self.of(before) if before[1] else root_of(namespace)
            found = self._hashes[page] = self.behind(parent, tokens[-self.size :])
        return found

    def behind(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a page's tokens after a page."""
        return hashlib.sha256(parent + array("i", tokens).tobytes()).digest()


class Told:
    """Hashes of pages by component and tier, as events named them."""

    def __init__(self, names: Names, judge: Judge) -> None:
        self.names, self.judge = names, judge
        self.pages: dict[tuple[str, str], dict[bytes, int]] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events; each must fit those before (V1)."""
        for event in events:
            if isinstance(event, Cleared):
                self.pages.clear()
            elif not isinstance(event, Hit):
                self._apply(event)

    def _apply(self, event: Stored | Moved | Evicted) -> None:
        pages, size = event.pages, self.names.size
        there = self.pages.setdefault((event.component, event.tier.value), {})
        parent = root_of(pages.namespace) if pages.parent is None else pages.parent
        tokens = pages.tokens.tolist()
        for number, name in enumerate(pages.hashes):
            page = tokens[number * size : (number + 1) * size]
            if name != self.names.behind(parent, page):
                said = f"{page} has another hash than its tokens behind page {pages.start} give"
                self.judge.fail("V1", event.component, said)
            if (name in there) is not isinstance(event, Evicted):
                said = f"{type(event).__name__} of page {pages.start + number} with {page} "
                said += f"on {event.tier.value}: it is {'' if name in there else 'not '}there"
                self.judge.fail("V1", event.component, said)
            if isinstance(event, Evicted):
                there.pop(name, None)
            else:
                there[name] = pages.start + number
            parent = name

    def check(self, after: Snapshot, reader: str) -> None:
        """It has exactly the tree's data (V2)."""
        for component, held in after.held.items():
            for tier, cells in (("device", held.device), ("host", held.host)):
                told = self.pages.get((component, tier), {})
                found = [page for page in cells if not isinstance(page[0], Gone)]
                there = {self.names.of(page): page for page in found}
                untold = [there[name] for name in there.keys() - told.keys()]
                gone = [told[name] for name in told.keys() - there.keys()]
                if untold or gone:
                    said = f"{reader}: no event tells that {untold} are on {tier}, "
                    said += f"nor that pages {gone} are gone from there"
                    self.judge.fail("V2", component, said)
                for name, page in there.items():
                    if told.get(name) != len(page[1]) // self.names.size - 1:
                        said = f"{reader}: {page} is told to be page {told.get(name)}"
                        self.judge.fail("V2", component, said)


@dataclass
class Lost:
    """The events that a reader lost.

    Attributes:
        n_events: events, since it listens.
        since: events that there had been when it read last, or failed.
    """

    n_events: int = 0
    since: int = 0


class Watching:
    """The readers of one cache; they listen in turns of some calls, and not in between.

    Args:
        cache: the cache.
        size: tokens per page.
        judge: raises broken rules.
    """

    def __init__(self, cache: Cache, size: int, judge: Judge) -> None:
        self.cache, self.judge = cache, judge
        self._names = Names(size)
        self._calls = self._deliveries = self._raised = 0
        self._delivered = False
        self._good_began = self._lagging_began = False
        self._clear_is_news: set[str] = set()
        self._streams: list[EventStream] = []
        self._n_taken = 0
        """Events that the good reader took."""
        self._lagging_lost, self._failing_lost = Lost(), Lost()
        self._counted = 0, 0
        """Of the other observer, as it was told and by the model."""

    def check(self, after: Snapshot) -> None:
        """After a call: the events equal the tree's data."""
        self._calls += 1
        phase = self._calls % ROUND
        if phase == SILENT:
            self._listen()
        if not self._streams:
            return
        good, lagging, failing = self._streams
        events = good.take()
        if self._good_began and any(isinstance(event, Cleared) for event in events):
            self._clear_is_news = {"a reader that lags", "an observer"}
        self._n_taken += len(events)
        self._good_began = True
        self._good.apply(events)
        self._good.check(after, "a reader")
        if phase % EVERY == 0:
            self._read_late(lagging, after)
        if self._delivered:
            self._failing.check(after, "an observer")
            self._delivered = False
        self._expect_lost("an observer", *self._counted)
        self.judge.expect(
            failing.failures == self._raised,
            "V3",
            None,
            lambda: f"{self._raised} failures of an observer, {failing.failures} counted",
        )
        if phase == 0:
            for stream in self._streams:
                stream.close()
            self._streams = []

    def _listen(self) -> None:
        told = [Told(self._names, self.judge) for _ in range(3)]
        self._good, self._lagging, self._failing = told
        self._raised, self._begins_again = 0, True
        self._good_began, self._clear_is_news = False, set()
        self._lagging_began, self._counted = False, (0, 0)
        self._lagging_lost, self._failing_lost = Lost(), Lost()
        self._streams = [
            self.cache.events(),
            self.cache.events(limit=ROOM),
            self.cache.observe(self._observe),
        ]

    def _read_late(self, lagging: EventStream, after: Snapshot) -> None:
        """It begins again if too much came meanwhile, all of which was counted as lost (V3)."""
        lost, events = lagging.lost, lagging.take()
        waited = self._n_told - self._lagging_lost.since
        if self._lagging_began and waited > ROOM:
            self._lagging_lost.n_events += waited
        self._expect_lost("a reader that lags", lost, self._lagging_lost.n_events)
        self._lagging_began, self._lagging_lost.since = True, self._n_told
        again = bool(events) and isinstance(events[0], Cleared)
        if len(events) > ROOM and not again:
            self.judge.fail("V3", None, f"{len(events)} events waited, with room for {ROOM}")
        cleared = "a reader that lags" in self._clear_is_news
        self._clear_is_news.discard("a reader that lags")
        if again and self._lagging.pages and not lost and not cleared:
            self.judge.fail("V3", None, "a reader begins again, and no event was lost")
        self._lagging.apply(events)
        self._lagging.check(after, "a reader that lags")

    @property
    def _n_told(self) -> int:
        """Events so far, by the good reader."""
        return self._n_taken + len(self._streams[0])

    def _expect_lost(self, reader: str, counted: int, n_lost: int) -> None:
        if counted != n_lost:
            said = f"{reader} lost {n_lost} events, {counted} are counted"
            self.judge.fail("V3", None, said)

    def _observe(self, events: list[Event]) -> None:
        lost = self._failing_lost
        if self._raised and self._begins_again:
            lost.n_events += self._n_told - lost.since
        first = events[0]
        if self._begins_again and isinstance(first, Cleared):
            self._counted = first.lost, lost.n_events  # an exception here would be its own
        cleared = "an observer" in self._clear_is_news
        self._clear_is_news.discard("an observer")
        begins = isinstance(events[0], Cleared)
        if self._begins_again is not begins and not (begins and cleared):
            self.judge.fail("V3", None, f"after a failure an observer got {events[0]} first")
        self._deliveries += 1
        self._begins_again = self._deliveries % FAILS == 0
        if self._begins_again:
            self._raised += 1
            lost.n_events += len(events)
            lost.since = self._n_told
            raise ReaderError("this observer fails at times")
        self._failing.apply(events)
        self._delivered = True
