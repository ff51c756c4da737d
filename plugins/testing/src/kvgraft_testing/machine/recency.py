"""When each component's data was last used, as the model counts it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from math import inf
from typing import NamedTuple

from kvgraft_testing.machine.brute_force import BruteForce, Gone, ModelComponent, Prefix
from kvgraft_testing.machine.keeping import BY_AGE, Keeping
from kvgraft_testing.machine.observing import NodeView, Snapshot

__all__ = ["LEFT_FIRST", "Rank", "Recency", "Retention"]

Rank = tuple[float, float, int]
"""When data is to leave, the lowest first: its level, the policy's order, its last use."""

LEFT_FIRST = -inf
"""The level of evict-first data."""

EXPIRED = -1000.0
"""The level of expired data."""

LEFT = 1 << 40
"""Subtracted from the clock for evict-first data: before everything else, oldest first."""

MOST_RETENTIONS = 400
"""Most retentions that are kept of each namespace; an example has fewer."""


class Retention(NamedTuple):
    """How long the data of a request's uses is kept.

    Attributes:
        priority: of a lower one leaves first.
        until_s: when it expires, in seconds of the machine's clock.
    """

    priority: int = 0
    until_s: float = inf


class Recency:
    """When each component's page was last used.

    A use of a page is a use of its whole prefix for a component that needs all of it. The cache
    does that lazily, tier by tier: a stamp climbs when the nodes below leave the tier. So for a
    page below which a tier had a gap when it was used, the model has the latest use (`used`), and
    the latest that the tier certainly knows (`known`).
    """

    def __init__(self, model: BruteForce, keeping: Keeping = BY_AGE) -> None:
        self.model = model
        self.keeping = keeping
        self.clock = 0
        self.now_s = self.was_s = 0.0
        """The clock as the cache read it last, by the end of this operation and before it."""
        self._retentions: dict[object, deque[tuple[int, Retention]]] = {}
        """By namespace, the retentions of its data's uses and the clock from which on they held."""
        self.used: dict[str, dict[Prefix, int]] = {each.name: {} for each in model.components}
        self.known: dict[tuple[str, str], dict[Prefix, int]] = {
            (each.name, tier): {} for each in model.components for tier in ("device", "host")
        }
        self._before: dict[tuple[str, str, Prefix], int] = {}
        self.reserved: dict[str, dict[Prefix, int]] = {each.name: {} for each in model.components}
        """Pages in the clean reserve, with their last use when they came there."""

    def settle(self, uses: Iterable[tuple[object, Iterable[Retention | None]]]) -> None:
        """An operation begins: from now on its own uses are distinguished from earlier ones.

        Data that it uses gets the retention of its request, which is of that namespace; one of
        theirs where it has several requests.
        """
        self._before.clear()
        self.was_s = self.now_s
        for namespace, retentions in uses:
            asked = [each for each in retentions if each is not None]
            if asked:
                self.clock += 1
                self._retentions.setdefault(namespace, deque(maxlen=MOST_RETENTIONS)).extend(
                    [(self.clock, each) for each in asked]
                )

    def cleared(self, gone: Mapping[object, Gone]) -> None:
        """Namespaces were cleared: the next use of data there counts as its first."""
        for pages in (*self.used.values(), *self.known.values(), *self.reserved.values()):
            for page in [page for page in pages if page[0] in gone]:
                pages[gone[page[0]], page[1]] = pages.pop(page)
        for namespace, there in gone.items():
            if namespace in self._retentions:
                self._retentions[there] = self._retentions[namespace].copy()

    def _note(self, name: str, tier: str, page: Prefix) -> None:
        known = self.known[name, tier]
        self._before.setdefault((name, tier, page), known.get(page, 0))
        known[page] = self.clock

    def created(self, pages: set[Prefix]) -> None:
        """Nodes for these pages appeared."""
        self.clock += 1
        for name in self.used:
            self.adopted(name, pages)

    def adopted(self, name: str, pages: set[Prefix]) -> None:
        """An insert gave a component data."""
        self.used[name].update(dict.fromkeys(pages, self.clock))
        for tier in ("device", "host"):
            for page in pages:
                self._note(name, tier, page)

    def touched(self, name: str, pages: Iterable[Prefix]) -> None:
        """A component's pages may count as used."""
        self.used[name].update(dict.fromkeys(pages, self.clock))

    def again(self, name: str, pages: set[Prefix], nodes: Iterable[NodeView]) -> None:
        """Existing pages were computed again, and are not evict-first (I9)."""
        self.beside(name, pages, nodes)
        self.touched(name, pages)
        for page in pages:
            if self.known[name, "device"].get(page, 0) < 0:
                self._note(name, "device", page)

    def beside(self, name: str, pages: set[Prefix], nodes: Iterable[NodeView]) -> None:
        """Pages were used: those in one node with them may count as used, except evict-first ones.

        Nodes are split from evict-first data.
        """
        used = self.used[name]
        for view in nodes:
            if not pages.isdisjoint(view.pages):
                self.touched(name, [page for page in view.pages if used.get(page, 0) >= 0])

    def left_behind(self, name: str, pages: set[Prefix], *, certain: bool) -> None:
        """Pages just adopted are the next victims, after older evict-first ones (I9).

        If that is not certain they may also be unchanged.
        """
        now = self.clock - LEFT
        used = self.used[name]
        for page in pages:
            used[page] = now if certain else max(now, used.get(page, 0))
            for tier in ("device", "host"):
                known = self.known[name, tier]
                known[page] = now if certain else min(now, known.get(page, 0))

    def resumed(
        self,
        sequence: Prefix,
        boundary: int,
        after: Snapshot,
        position: int = 0,
        since: int = 0,
        locked: Mapping[str, set[int]] | None = None,
    ) -> None:
        """A request resumes at a boundary, or continues from there after it got to `position`.

        Then it certainly uses only data within its reach from both. One that ended there certainly
        used the pages that it computed, from `since` on. Other pages that components pin, as in
        `locked`, may count as used.
        """
        self.clock += 1
        for component in self.model.components:
            name = component.name
            pages = self.model.prefixes(component, sequence, boundary)
            self.used[name].update(dict.fromkeys(pages, self.clock))
            for number in locked.get(name, ()) if locked else ():
                self.used[name][self.model.prefix(*sequence, number)] = self.clock
            if position > boundary and not component.is_prefix_closed:
                ahead = self.model.pages(component, position) if not component.is_state else ()
                pages = [page for page in pages if self.model.page_of(page) in ahead]
            pages = [page for page in pages if self.model.page_of(page) >= since]
            held = after.held[name]
            for tier, cells in (("device", held.device), ("host", held.host)):
                for page in reversed(pages):
                    if component.is_prefix_closed and page not in cells:
                        break
                    self._note(name, tier, page)

    def earliest(self, component: ModelComponent, tier: str, pages: tuple[Prefix, ...]) -> Rank:
        """The lowest rank that a cell may have; evict-first data goes before all (I9)."""
        first = self.certain(component, tier, pages)
        levels = self._levels(pages[-1], first, self.latest(component, pages), self.now_s)
        return self._rank(component, pages[-1], min(levels), first)

    def last(self, component: ModelComponent, tier: str, pages: tuple[Prefix, ...]) -> Rank:
        """The highest."""
        last = self.latest(component, pages)
        levels = self._levels(pages[-1], self.certain(component, tier, pages), last, self.was_s)
        return self._rank(component, pages[-1], max(levels), last)

    def _rank(
        self, component: ModelComponent, page: Prefix, at: tuple[float, float], used: int
    ) -> Rank:
        level, until_s = at
        if used < 0:
            return LEFT_FIRST, 0, used
        if level == EXPIRED:
            return level, until_s, used
        if self.keeping.by_cost and not component.is_prefix_closed:
            return level, 0, 0
        # data keeps the place that its namespace had in the order when that was cleared
        namespace = page[0].namespace if isinstance(page[0], Gone) else page[0]
        return level, self.keeping.rank(namespace), used

    def _levels(
        self, page: Prefix, first: int, last: int, now_s: float
    ) -> list[tuple[float, float]]:
        """The levels that data has by some time whose last use is one from `first` to `last`.

        With the end of its time, where that is over.
        """
        there = self._retentions.get(page[0], ())
        until = [(at, retention) for at, retention in there if at <= max(first, last)]
        begun = [at for at, _ in until if at <= first]
        found = [
            _level(retention, now_s) for at, retention in until if not begun or at >= begun[-1]
        ]
        return found if begun else [(0, 0), *found]

    def is_next(self, name: str, page: Prefix) -> bool:
        """Whether data is in the clean reserve, and was not used since it was entered."""
        used = self.used[name].get(page, 0)
        return used >= 0 and self.reserved[name].get(page) == used

    def latest(self, component: ModelComponent, pages: tuple[Prefix, ...]) -> int:
        """Last use, this operation's included."""
        return max(self.used[component.name].get(page, 0) for page in pages)

    def certain(self, component: ModelComponent, tier: str, pages: tuple[Prefix, ...]) -> int:
        """Last use that a tier certainly knows; room may be made before an operation's own use."""
        name = component.name
        known = self.known[name, tier]
        return max(self._before.get((name, tier, page), known.get(page, 0)) for page in pages)


def _level(retention: Retention, now_s: float) -> tuple[float, float]:
    """The level of data with a retention by some time, and the end of that if it is over."""
    if retention.until_s <= now_s:
        return EXPIRED, retention.until_s
    return retention.priority, 0
