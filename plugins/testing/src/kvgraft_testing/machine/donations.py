"""Checks of the data a request gives to the tree: at a checkpoint and at its end (I1 to I7)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from kvgraft.config import WritePolicy
from kvgraft.requests.request import Request
from kvgraft_testing.machine.bench import Bench
from kvgraft_testing.machine.engines import Point
from kvgraft_testing.machine.hooks import locks
from kvgraft_testing.machine.keeping import HINTS
from kvgraft_testing.machine.legality import Pressure
from kvgraft_testing.machine.live import Live
from kvgraft_testing.machine.observing import Snapshot
from kvgraft_testing.machine.predicting import Adopted
from kvgraft_testing.machine.publishing import Tables

__all__ = ["Donations"]

T = TypeVar("T")

NEVER = 1 << 40
"""Behind the last page of every sequence."""


class Donations:
    """Checkpoints and finishes."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.cache, self.model, self.judge = bench.cache, bench.model, bench.judge

    def _share(
        self,
        live: Live,
        boundary: int,
        name: str,
        operation: Callable[[], T],
        *,
        keep_slots: bool = False,
    ) -> T:
        """Run an operation that inserts up to a boundary, which becomes a resume point."""
        bench, publishing = self.bench, self.bench.publishing
        before, tables, skipped = bench.seen, publishing.tables(live), publishing.skipped
        since_page, gives = live.anchor, False

        def uses(result: T) -> Adopted | None:
            nonlocal boundary, gives
            own = live.own
            if name == "checkpoint":
                publishing.settle(live, before, skipped)
                # The model is not always sure that a left-behind state finds a place.
                boundary = self._deepest(live)
                if result:
                    self._continues_from(live, boundary)
            gives = boundary > since_page or (
                not keep_slots
                and any(page < boundary for pages in own.private.values() for page in pages)
            )
            if result is False or not gives:
                return None
            if bench.resuming.matters:
                own.points.add(boundary)
            kept = self._kept(live, before) if keep_slots else {}
            leaving = bench.resuming.leave(own, live.prompt, boundary, kept)
            offer = publishing.offer(live, leaving, tables)
            publishing.note(before, offer, made_room=name == "checkpoint")
            position = live.computed // self.model.page_size
            # Data it left behind earlier may count as used when it ends, or may not.
            since = NEVER if name == "finish" else 0
            locked = locks(bench.calls, boundary)
            bench.recency.resumed(live.sequence, boundary, bench.seen, position, since, locked)
            for each in bench.resuming.prefix_closed:  # in the tree already, and pinned till now
                ahead = range(boundary, own.based)
                prefixes = [self.model.prefix(*live.sequence, page) for page in ahead]
                bench.recency.touched(each.name, prefixes)
            return publishing.adopted(before, offer)

        write_through = bench.sizes.policy is WritePolicy.WRITE_THROUGH
        pressure = Pressure(
            asks=live.namespace,
            device={} if name == "finish" else {each.name: 1 for each in bench.states},
            host=dict.fromkeys(bench.mirrored) if write_through else {},
            passing={
                self.model.prefix(live.namespace, live.tuple, page)
                for page in range(max(boundary, live.own.based, 0))
            },
        )
        result = bench.act(name, operation, pressure=pressure, uses=uses, by=[live.using])
        if result is not False and gives:
            publishing.check(live, since_page, boundary)
        if keep_slots:
            self._check_slots_stay(live, tables)
        return result

    def _kept(self, live: Live, before: Snapshot) -> dict[str, set[int]]:
        """Per component, pages of its own that the tree has of others: they stay its own (N1)."""
        return {
            name: {
                page
                for page in pages
                if self.model.prefix(*live.sequence, page) in before.held[name].device
            }
            for name, pages in live.own.private.items()
        }

    def _check_slots_stay(self, live: Live, tables: Tables) -> None:
        """The tables that its kernels were given are still right where it reads (N1)."""
        position = live.computed // self.model.page_size
        for each in self.bench.paged:
            after = self.bench.publishing.table(live, each, "device")
            needed = {*self.model.pages(each, position), *range(position, len(after))}
            for page, (was, now) in enumerate(zip(tables[each.name], after)):
                if was != now and (page in needed or now[0] >= 0) and was[0] >= 0:
                    said = f"slots of page {page} of {live.name} were {was} and are {now}"
                    self.judge.fail("N1", each.name, said)

    def checkpoint(self, live: Live, *, keep_slots: bool = False) -> None:
        """Share the data computed so far; declined only for a reason (I5, I6, A12)."""
        bench, own = self.bench, live.own
        if live.cleared:
            self._share_nothing(live, "checkpoint", self.cache.checkpoint)
            return
        due = {live.standing} if bench.publishing.keeps(live, bench.seen) else set()
        boundary = self._deepest(live, due)
        is_new = boundary > max(live.anchor, own.based) or any(
            page < boundary for pages in own.private.values() for page in pages
        )
        declined = self.cache.publisher.declined_checkpoints
        if keep_slots:
            is_new = boundary > max(live.anchor, own.based)
        moved = self._share(
            live,
            boundary,
            "checkpoint",
            lambda: self.cache.checkpoint(live.request, bench.fence, keep_slots=keep_slots),
            keep_slots=keep_slots,
        )
        bench.trace.outcome("shared" if moved else "declined")
        if not is_new and not moved:
            return
        # A state that was due and is not there found no slot, although it was budgeted.
        self.judge.expect(
            moved or self.cache.publisher.declined_checkpoints == declined + 1,
            "A10" if bench.states else "I6",
            bench.states[0].name if bench.states else None,
            lambda: f"a checkpoint of {live.name} at page {boundary} was declined for nothing",
        )

    def _deepest(self, live: Live, due: Collection[int] = ()) -> int:
        """The boundary up to which a request can share its data, if states due are kept."""
        page = live.computed // self.model.page_size
        if not self.bench.states:
            return page
        return min(page, max((live.own.shared, *live.own.captured, *due)))

    def _continues_from(self, live: Live, boundary: int) -> None:
        """A request shared its data up to a boundary, and is pinned there."""
        live.anchor = live.cached = boundary
        if self.bench.states:
            live.own.last_point = max(live.own.last_point, boundary)
        live.locked = {}

    def _share_nothing(
        self, live: Live, name: str, operation: Callable[[Request, Point], int]
    ) -> None:
        """A request whose namespace was cleared shares nothing."""
        bench = self.bench
        shared = bench.act(name, lambda: operation(live.request, bench.fence))
        self.judge.expect(
            not shared, "I6", None, lambda: f"{name} of {live.name}, cleared, shares {shared}"
        )

    def finish(self, live: Live) -> None:
        """End a request; all data that can be cached is cached (I6, I7)."""
        size, own = self.model.page_size, live.own
        boundary, rest = divmod(live.computed, size)
        if self.bench.states:
            if not rest and live.started and boundary:
                own.captured.add(boundary)
            elif live.tracked:
                own.captured.add(live.tracked)
            boundary = min(boundary, max((own.shared, *own.captured), default=0))
        self.bench.live.remove(live)
        if live.cleared:
            self._share_nothing(live, "finish", self.cache.finish)
            return
        hint = HINTS[live.computed % len(HINTS)]
        live.retention = self.bench.retention(live.namespace)
        cached = self._share(
            live,
            boundary,
            "finish",
            lambda: self.cache.finish(live.request, self.bench.fence, hint),
        )
        self.bench.trace.outcome(f"{cached} tokens cached")
        found = self.bench.predictor.found(self.bench.seen, live.sequence, live.computed // size)
        self.judge.expect(
            cached <= found.deepest * size,
            "G6",
            None,
            lambda: (
                f"finishing {live.name} cached {cached} tokens, a next request finds "
                f"{found.deepest * size}"
            ),
        )
        page = max(boundary, live.cached)
        if self.bench.states:  # one that it shared before may have been evicted since
            page = self.bench.predictor.found(self.bench.seen, live.sequence, page).deepest
        expected = page * size
        self.judge.expect(
            cached == expected,
            "I6",
            None,
            lambda: f"finishing {live.name} cached {cached} tokens, the model says {expected}",
        )
