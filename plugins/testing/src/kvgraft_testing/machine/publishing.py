"""Handing data to the tree: its expected adoption, and its use (I1, I9, I10)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraft.types import PointKind
from kvgraft_testing.machine.brute_force import ModelComponent, Prefix
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.observing import Snapshot
from kvgraft_testing.machine.predicting import Adopted, adopted
from kvgraft_testing.machine.resuming import Published

if TYPE_CHECKING:
    from kvgraft_testing.machine.bench import Bench

__all__ = ["Offer", "Publishing", "Tables"]

Tables = dict[str, list[tuple[int, ...]]]
"""Per paged component, a request's slots page by page."""


@dataclass
class Offer:
    """Data that a request hands to the tree.

    Attributes:
        pages: per component, the slots of each page; None for a state.
        left: those of them that are evict-first.
        path: every page up to the boundary.
    """

    pages: Adopted
    left: dict[str, set[Prefix]]
    path: set[Prefix]


class Publishing:
    """Requests' data on its way to the tree of one cache."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cache, self.model, self.judge = bench.cache, bench.model, bench.judge

    def tables(self, live: Live, tier: str = "device") -> Tables:
        """The request's slots, as a kernel would look them up."""
        return {
            each.name: self.table(live, each, tier)
            for each in self.bench.paged
            if tier == "device" or each.home_is_host
        }

    def table(self, live: Live, component: ModelComponent, tier: str) -> list[tuple[int, ...]]:
        """One component's."""
        asked = self.cache.table if tier == "device" else self.cache.host_table
        table: list[int] = asked(live.request, component.name).tolist()
        per_page = component.slots_per_page
        return [tuple(table[at : at + per_page]) for at in range(0, len(table), per_page)]

    def offer(self, live: Live, published: Published, tables: Tables) -> Offer:
        """The data that leaves a request, by its keys in the tree."""

        def named(page: int) -> Prefix:
            return self._prefix(live, page)

        pages: Adopted = {
            name: {named(page): tables[name][page] for page in numbers}
            for name, numbers in published.pages.items()
        }
        left = {name: {named(page) for page in n} for name, n in published.left.items()}
        for state in self.bench.states:
            pages[state.name] = {named(page - 1): None for page in published.states}
            left[state.name] = {named(page - 1) for page in published.left[state.name]}
        return Offer(pages, left, {named(page) for page in range(published.end)})

    def adopted(self, before: Snapshot, offer: Offer) -> Adopted:
        """The part of an offer that the tree must take."""
        return adopted(self.model, before, offer.pages)

    def note(self, before: Snapshot, offer: Offer, *, made_room: bool = False) -> None:
        """Note the pages that an offer makes the latest used, and evict-first ones.

        If room was made first, a page may have left and come back, and be evict-first anew.
        """
        after, recency = self.bench.seen, self.bench.recency
        known = before.known()
        recency.created(offer.path - known)
        for component in self.model.components:
            name = component.name
            was, held = before.held[name], after.held[name]
            # a step has several offers
            gained = offer.path & (held.device.keys() - was.device.keys())
            left = offer.left[name] & gained if name in offer.left else set()
            again = offer.pages[name].keys() - gained - offer.left.get(name, set())
            recency.again(name, again, before.nodes)
            recency.beside(name, gained, after.nodes)  # a leaf that grew has one use
            recency.adopted(name, gained)
            if not component.home_is_host:
                on_host = {page for page in left if page in was.host}
                recency.left_behind(name, left - on_host, certain=True)
                gone = {page for page in on_host if page not in held.host}
                recency.left_behind(name, gone, certain=False)
                if made_room:
                    recency.left_behind(name, offer.left[name] & was.device.keys(), certain=False)
            if component.is_prefix_closed:
                recency.touched(name, offer.path)

    def went(
        self, live: Live, before: Snapshot, tables: Tables, *, made_room: bool = False
    ) -> Adopted | None:
        """The data that left a running request; the tree must have adopted part of it (I9, I10).

        The core decides which pages it hands over and when, and others may have some already. None
        of them may be in its reach, and none that a point needs may be lost.
        """
        own, request, resuming = live.own, live.request, self.bench.resuming
        kept = {part.component.name: part.runs for part in request.components}
        pages = {
            each.name: own.private[each.name]
            - {page for run in kept[each.name] for page in range(run.first, run.end)}
            for each in self.bench.paged
        }
        held = {page for part in request.state_components for page in part.captured}
        states = own.captured - held
        if not states and not any(pages.values()):
            return None
        position = live.computed // self.model.page_size
        grid = resuming.goes_on(own, live.prompt, position)
        met = any(request.points.get(page) is PointKind.GRID for page in grid)
        if request.last_point >= position or met or self._gave(live, before, pages):
            own.points |= grid
            own.last_point = (
                max(own.last_point, position) if not self.bench.states else (own.last_point)
            )
        passed: dict[str, set[Prefix]] = {}
        state = resuming.reached_from(live.prompt, live.computed)
        reached = {each.name: self.model.pages(each, state) for each in resuming.bounded}
        for each in resuming.bounded:
            needed = pages[each.name] & reached[each.name]
            if needed:
                said = f"{live.name} at {live.computed} gives up pages {needed} of its last state"
                self.judge.fail("G3", each.name, said)
            there, now = before.held[each.name], self.bench.seen.held[each.name]
            for page in sorted(pages[each.name]):
                prefix = self._prefix(live, page)
                back = prefix not in now.device
                dropped = resuming.may_drop(own, live.prompt, live.computed, each.name, page)
                crowded = (
                    prefix in there.device_pinned or self._prefix(live, own.based) in before.known()
                )
                if back and (dropped or made_room or crowded or live.cleared):
                    pages[each.name].discard(page)
                    own.private[each.name].discard(page)
                    own.dropped.add(page)
                    if prefix in there.host:  # the tree may have looked at it and kept its own
                        self.bench.recency.touched(each.name, [prefix])
                    if made_room and prefix in now.host and prefix not in there.host:
                        passed.setdefault(each.name, set()).add(prefix)
        end = max([*states, *(page + 1 for each in pages.values() for page in each)], default=0)
        published = resuming.published(own, pages, states, end)
        own.based = max(own.based, request.receipt.anchor.end)
        offer = self.offer(live, published, tables)
        self.note(before, offer, made_room=made_room)
        for name, gone in passed.items():  # to the tree and on to HOST, in one call
            self.bench.recency.adopted(name, gone)
            self.bench.recency.left_behind(name, gone, certain=False)
        return self.adopted(before, offer)

    def _gave(self, live: Live, before: Snapshot, pages: Mapping[str, set[int]]) -> bool:
        """Whether some of these pages went to the tree for sure: others had none there."""
        if live.request.receipt.anchor.end > live.own.based:
            return True
        after = self.bench.seen
        return any(
            self._prefix(live, page) in after.held[name].device.keys() - before.held[name].device
            for name, numbers in pages.items()
            for page in numbers
        )

    # -- states

    @property
    def skipped(self) -> Counter[PointKind]:
        """Points that the core says it skipped, by kind."""
        return Counter(self.cache.points.skipped)

    def check_skipped(
        self, live: Live, before: Counter[PointKind], pages: Iterable[int], where: str
    ) -> None:
        """The points of a request that it is without since are counted, each once (I11)."""
        counted, expected = self.skipped - before, live.count_skipped(pages)
        self.bench.counts["points skipped"] += expected.total()
        if counted != expected:
            said = f"points are counted as skipped: {dict(counted)}, not {dict(expected)}"
            self.judge.fail("I11", self.bench.states[0].name, f"{where}: {said}")

    def keeps(self, live: Live, seen: Snapshot) -> bool:
        """Whether the states a request stands at are kept before it goes on.

        A promised state is always kept. Another one needs headroom in every pool. An evict-first
        one needs a free slot or that of an earlier evict-first state, of the tenant that loses data
        first (K5), so each possible tenant must have one.
        """
        if not live.standing or live.standing_as == "point":
            return bool(live.standing)
        used = self.bench.recency.used
        for state in self.bench.states:
            books, held = seen.books[state.name, "device"], seen.held[state.name]
            idle: dict[int, list[bool]] = {}
            for page in held.device.keys() - held.device_pinned:
                if seen.may_take(state.name, "device", live.namespace, page[0]):
                    left = used[state.name].get(page, 0) < 0
                    idle.setdefault(seen.tenant_of(page[0]), []).append(left)
            place = books.free > 0 or (bool(idle) and all(any(left) for left in idle.values()))
            room = seen.headroom(state.name, "device", live.namespace)
            if room < 1 or (live.standing_as == "left" and not place):
                return False
        return True

    def settle(self, live: Live, before: Snapshot, skipped: Counter[PointKind]) -> None:
        """The states a request stood at are kept: for every component or for none (I10, I11).

        Room that was made in the same call may have freed a slot for an evict-first state.
        """
        page, own, kind = live.standing, live.own, live.standing_as
        if not page:
            return
        expected = self.keeps(live, before)
        live.standing = 0
        there = live.request.left if kind == "left" else live.request.points
        kept, name = page in there, self.bench.states[0].name
        said = f"the state of {live.name} at page {page} ({kind})"
        if expected and not kept:
            self.judge.fail("I10", name, f"{said} is not kept, there is room for it")
        if kept and not expected and kind != "left":
            self.judge.fail("I11", name, f"{said} is kept, no slot is to spare for it")
        self.check_skipped(live, skipped, [page] if kind == "grid" and not kept else (), said)
        if not kept:
            return
        own.captured.add(page)
        if kind == "left":
            own.left.add(page)
            own.last_left = page
        else:
            own.points.add(page)
            own.last_point = page

    # -- data that must be there

    def check_points(self, live: Live) -> None:
        """The resume points decided so far are those of the model (I10)."""
        points = set(live.request.points)
        self.judge.expect(
            points == live.own.points,
            "I10",
            None,
            lambda: f"resume points of {live.name} are at pages {points}, not {live.own.points}",
        )

    def check(self, live: Live, start: int, end: int) -> None:
        """Every boundary behind `start`, up to `end`, that must be resumable is (I9, I10)."""
        self.check_points(live)
        model, own, seen = self.model, live.own, self.bench.seen
        states = self.bench.resuming.states
        readable = {each.name: seen.readable(each) for each in model.components}
        for boundary in range(start + 1, end + 1):
            is_point = boundary in own.points
            if states and not (is_point or boundary in own.left):
                continue
            if states and (boundary > own.shared or boundary in own.captured):
                continue
            lacks = [
                (each, page)
                for each, pages in self._needed(boundary)
                for page in sorted(pages)
                if self._prefix(live, page) not in readable[each.name]
            ]
            if any(self._excused(live, each, page) for each, page in lacks):
                continue
            if any(page in own.private[each.name] for each, page in lacks):
                continue
            for each, page in lacks:
                rule = "I10" if is_point else "I9"
                kind = "a resume point" if is_point else "left behind"
                said = (
                    f"page {page} of {live.sequence} is nowhere and was not evicted; "
                    f"boundary {boundary} of {live.name} is {kind}"
                )
                self.judge.fail(rule, each.name, said)

    def _needed(self, boundary: int) -> list[tuple[ModelComponent, set[int]]]:
        """Pages that every component needs at a boundary; a state counts as the page before it."""
        return [
            (each, {boundary - 1} if each.is_state else set(self.model.pages(each, boundary)))
            for each in self.model.components
        ]

    def _excused(self, live: Live, component: ModelComponent, page: int) -> bool:
        """Whether a page was evicted, or given back."""
        return (
            self._prefix(live, page) in self.bench.gone[component.name] or page in live.own.dropped
        )

    def _prefix(self, live: Live, page: int) -> Prefix:
        return self.model.prefix(live.namespace, live.tuple, page)
