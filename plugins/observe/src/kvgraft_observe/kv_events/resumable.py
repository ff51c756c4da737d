"""The blocks up to which a request could resume, of all components together.

A router that indexes one cache group takes each block of it for a hit. A model with windows or
recurrent states resumes only where all of them have data, so the blocks of full attention alone
promise too much, and a model without full attention has none. This follows the events of all
components and knows, for every page, whether a boundary that all of them accept lies at it or
behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvgraft import Tier
from kvgraft.reach import PageReach
from kvgraft.tree.component import TreeComponent
from kvgraft.types import Span
from kvgraft_observe.events import Evicted, Moved, Pages, Stored

__all__ = ["Change", "Resumable"]

ON = {Tier.DEVICE: 1, Tier.HOST: 2}


class Change(NamedTuple):
    """Consecutive pages that an event made resumable, or not resumable any more.

    Attributes:
        tier: DEVICE if requests resume behind them from DEVICE alone, HOST if from both tiers.
        pages: the pages.
    """

    tier: Tier
    pages: Pages


class _Page:
    """A page that some component has, or has had behind it.

    Attributes:
        pages, at: where its tokens are: the pages that it came with, and its number.
        parent: the page before; None at the start of a sequence.
        children: pages behind it, by hash.
        held: by component, the tiers that have its data.
        runs: by view and component, how many consecutive pages up to this one have data.
        accepts: by view, whether a request could resume behind it.
        covers: by view, how many of its children lead to such a page, and 1 more if it is one.
    """

    __slots__ = ("accepts", "at", "children", "covers", "held", "pages", "parent", "runs")

    def __init__(self, pages: Pages, at: int, parent: _Page | None, views: int, n: int) -> None:
        self.pages, self.at, self.parent = pages, at, parent
        self.children: dict[bytes, _Page] = {}
        self.held = [0] * n
        self.runs = [[0] * n for _ in range(views)]
        self.accepts = [False] * views
        self.covers = [0] * views


class Resumable:
    """Follows the events of one cache.

    A page is covered, for a view, if a request could resume at a boundary at it or behind it. There
    are two views: from DEVICE alone, and from both tiers if the cache has HOST.

    Args:
        components: the cache's, in the tree's order.
        page_size: tokens of a page.
    """

    #   component    p1  p2  p3  p4          covered: the pages up to the last boundary that every
    #   full          x   x   x   x           component accepts, here that behind p2; eviction of
    #   state             x                   the state uncovers p1 and p2, though full has them

    def __init__(self, components: Sequence[TreeComponent], page_size: int) -> None:
        self._index = {each.name: each.index for each in components}
        self._reaches = [PageReach(each.reach, page_size, each.name) for each in components]
        self._is_local = all(
            each.is_state or each.is_prefix_closed or each.window_pages is not None
            for each in self._reaches
        )
        """Whether a page accepts what it did if the runs up to the page before are what they were.
        """
        self._views = [(Tier.DEVICE, ON[Tier.DEVICE])]
        if any(each.host is not None for each in components):
            self._views.append((Tier.HOST, ON[Tier.DEVICE] | ON[Tier.HOST]))
        self._pages: dict[bytes, _Page] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def clear(self) -> None:
        """Forget everything, as at a `Cleared`."""
        self._pages.clear()

    def apply(self, event: Stored | Moved | Evicted) -> Iterator[Change]:
        """Take an event in: the pages that it covers or uncovers, those of a sequence together."""
        component, tier = self._index[event.component], ON[event.tier]
        leaves = isinstance(event, Evicted)
        told = self._records(event.pages)
        for page in told:
            page.held[component] = (page.held[component] & ~tier) | (0 if leaves else tier)
        changed: list[list[_Page]] = [[] for _ in self._views]
        self._recompute(told, changed)
        for (view, _), pages in zip(self._views, changed):
            yield from _changes(view, pages)
        if leaves:
            for page in reversed(told):
                self._forget(page)

    def _records(self, pages: Pages) -> list[_Page]:
        """The records of pages; makes them, and those of the pages before that are not known."""
        unknown = [pages]
        while (before := unknown[-1].before) is not None and before.hashes[-1] not in self._pages:
            unknown.append(before)
        parent = None if before is None else self._pages[before.hashes[-1]]
        found: list[_Page] = []
        for each in reversed(unknown):
            found = []
            for at, name in enumerate(each.hashes, each.start):
                page = self._pages.get(name)
                if page is None:
                    page = _Page(each, at, parent, len(self._views), len(self._reaches))
                    self._pages[name] = page
                    if parent is not None:
                        parent.children[name] = page
                found.append(page)
                parent = page
        return found

    def _forget(self, page: _Page | None) -> None:
        """Drop a page without data and without pages behind it, and those before it likewise."""
        while page is not None and not any(page.held) and not page.children:
            name = page.pages.hashes[page.at - page.pages.start]
            if self._pages.pop(name, None) is not None and page.parent is not None:
                del page.parent.children[name]
            page = page.parent

    def _recompute(self, told: list[_Page], changed: list[list[_Page]]) -> None:
        """Compute the runs of consecutive pages anew, and of those behind as far as they change."""
        told_ids = {id(page) for page in told}
        waiting = told[:1]
        while waiting:
            page = waiting.pop()
            moved = self._update(page, changed)
            waiting += [
                child
                for child in page.children.values()
                if moved or not self._is_local or id(child) in told_ids
            ]

    def _update(self, page: _Page, changed: list[list[_Page]]) -> bool:
        """Compute one page's runs and boundaries; whether any run is another now."""
        moved, parent = False, page.parent
        for view, (_, mask) in enumerate(self._views):
            runs = [
                (1 if parent is None else parent.runs[view][index] + 1) if held & mask else 0
                for index, held in enumerate(page.held)
            ]
            moved = moved or runs != page.runs[view]
            page.runs[view] = runs
            accepts = all(
                bool(runs[index]) if reach.is_state else self._holds(page, view, index, reach)
                for index, reach in enumerate(self._reaches)
            )
            if accepts != page.accepts[view]:
                page.accepts[view] = accepts
                changed[view] += _cover(page, view, 1 if accepts else -1)
        return moved

    def _holds(self, page: _Page, view: int, index: int, reach: PageReach) -> bool:
        """Whether a component has all pages that its reach needs behind a page."""
        return all(
            _before(page, span).runs[view][index] >= span.end - span.start
            for span in reach.spans(page.at + 1)
        )


def _before(page: _Page, span: Span) -> _Page:
    """The last page of a range, which ends at a page or before it."""
    while page.at >= span.end:
        assert page.parent is not None
        page = page.parent
    return page


def _cover(page: _Page | None, view: int, by: int) -> list[_Page]:
    """Count a boundary at a page, or take one away: the pages that it covers or uncovers."""
    found = []
    while page is not None:
        was = page.covers[view]
        page.covers[view] += by
        if bool(was) == bool(page.covers[view]):
            break
        found.append(page)
        page = page.parent
    return found


def _changes(tier: Tier, pages: list[_Page]) -> Iterator[Change]:
    """Changes of pages, parents first; consecutive pages of one run are one change."""
    first: _Page | None = None
    last: _Page | None = None
    for page in sorted(pages, key=lambda each: each.at):
        if first is not None and last is not None:
            if page.parent is last and page.pages.run is first.pages.run:
                last = page
                continue
            yield Change(tier, first.pages.run.part(first.at, last.at + 1))
        first = last = page
    if first is not None and last is not None:
        yield Change(tier, first.pages.run.part(first.at, last.at + 1))
